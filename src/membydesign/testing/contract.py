"""What every design must pass. Inherit, set `design`, and dozens of checks come with it:

    class TestMyMemory(DesignContract):
        design = MyMemory()

Every method of filtering a design is held to the same class: `method`, `backend` and `chunk_size` select it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from torch import Tensor

from membydesign.belief import Belief
from membydesign.design import Design, DesignModel
from membydesign.state import form_of, from_form, map_state, named_tensors
from membydesign.testing.closeness import assert_close
from membydesign.testing.oracles import condition
from membydesign.testing.problems import Problem, random_problem, state_after

if TYPE_CHECKING:
    from membydesign.filter import Filtered

EXACT = 1e-12
"""Two ways to the same float64 numbers, over a few tokens."""

FLOAT32 = {
    # quantity: distance of a float32 filter from the float64 one over 64 and over 65,536 tokens, in units of one plus
    # the largest value; docs/concepts/recurrence.md has this table
    "output": (5e-6, 2e-5),
    "mean": (5e-6, 1e-5),
    "covariance": (2e-6, 5e-6),
    "variance": (2e-6, 5e-6),
    "write_log_evidence": (5e-6, 1e-5),
}


class DesignContract:
    """The contract of `filter_sequence` and `filter_step`, for one design.

    Attributes:
        design: the design under test.
        method: how it is filtered.
        chunk_size: likewise.
        backend: likewise.
        linear_in_values: whether outputs are linear in the written values: gains do not depend on them.
        zero_keys_write_nothing: whether a write at the key 0 leaves the state as it is.
    """

    design: ClassVar[Design]
    method: ClassVar[str] = "recurrent"
    chunk_size: ClassVar[int | None] = None
    backend: ClassVar[str] = "torch"
    linear_in_values: ClassVar[bool] = True
    zero_keys_write_nothing: ClassVar[bool] = True

    def prepare(self, problem: Problem) -> Problem:
        """Override it to tie random parameters together, such as a removal that must not exceed its decay."""
        return problem

    def oracle(self, problem: Problem) -> tuple[Tensor, Tensor] | None:
        """Outputs [B,T,H,M] and log evidence [B,H] from outside the recursion; None if there is no such reference.

        Exact linear-Gaussian designs are held to the joint Gaussian of all memories and writes. Override it for others.
        """
        if not isinstance(self.design, DesignModel) or not self.design.is_exact:
            return None
        B, _, H, _ = problem.q.shape
        every = [[condition(problem, b, h) for h in range(H)] for b in range(B)]
        outputs = [
            torch.stack([torch.einsum("tdm,td->tm", every[b][h].mean, problem.q[b, :, h]) for h in range(H)], 1)
            for b in range(B)
        ]
        evidence = torch.stack([torch.stack([every[b][h].log_evidence for h in range(H)]) for b in range(B)])
        return torch.stack(outputs), evidence

    def options(self) -> dict[str, bool]:
        """What to return: everything that the design has."""
        return {"return_variance": self.design.has_variance, "return_evidence": True}

    def problem(self, **sizes: Any) -> Problem:
        """A random problem, to be filtered as this class says."""
        problem = self.prepare(random_problem(self.design, **sizes))
        return replace(problem, options=self.filter_options(chunk_size=self.chunk_size))

    def filter_options(self, **options: Any) -> dict[str, Any]:
        """How to filter."""
        return {"method": self.method, "backend": self.backend, **options}

    def state(self, **sizes: Any) -> Any:
        """A state that is not the prior."""
        return state_after(self.problem(**{"T": 5, "seed": 1, **sizes}))

    def test_the_loop_equals_an_oracle(self):
        """References come from outside the recursion, to 1e-10."""
        problem = self.problem()
        expected = self.oracle(problem)
        if expected is None:
            assert not self.design.is_exact, "an exact design needs an oracle: override DesignContract.oracle"
            pytest.skip("no reference outside the recursion for an approximation")
        out = problem.filter(return_evidence=True)
        assert_close(out.output, expected[0], 1e-10)
        assert_close(out.log_evidence, expected[1], 1e-10)

    @pytest.mark.parametrize("backend", ["auto", "torch", "native"])
    def test_every_kernel_equals_the_loop(self, backend):
        """Outputs, state, variance, evidence and gradients of all inputs, in float64."""
        problem, initial = self.problem(T=21, D=6), self.state(D=6)
        reference = _with_gradients(replace(problem, options={"method": "recurrent"}), initial, self.options())
        try:
            ours = _with_gradients(replace(problem, options={"backend": backend}), initial, self.options())
        except ValueError as error:
            assert str(error).startswith("backend:")
            pytest.skip(f"no such kernel for this design: {error}")
        for name, expected in reference.items():
            assert_close(ours[name], expected, 1e-9, name)

    def test_bad_arguments_are_refused_by_name(self):
        """Missing, unexpected, misshapen and non-finite arguments raise a ValueError that starts with their name."""
        problem = self.problem(T=3)
        for name in problem.parameters:
            rest = {other: x for other, x in problem.parameters.items() if other != name}
            for bad in ({}, {name: torch.ones(5)}, {name: problem.parameters[name] * float("nan")}):
                with pytest.raises(ValueError, match=f"^{name}: expected"):
                    replace(problem, parameters={**rest, **bad}).filter()
        with pytest.raises(ValueError, match="^no_such_parameter: expected None"):
            problem.filter(no_such_parameter=1.0)
        with pytest.raises(ValueError, match="^v: expected finite"):
            replace(problem, v=problem.v * float("nan")).filter()

    def test_shapes_and_state_size(self):
        """Outputs have the documented shapes, and a state as many elements as declared."""
        D, M = 6, 4
        out = self.problem(B=2, T=3, H=5, D=D, M=M).filter(**self.options())
        assert out.output.shape == (2, 3, 5, M)
        assert out.log_evidence is not None
        assert out.log_evidence.shape == (2, 5)
        declared = self.design.state_size(D, M)
        assert sum(x[0, 0].numel() for _, x in named_tensors(out.belief)) == declared.total
        assert declared.total == declared.mean + declared.covariance
        if self.design.has_variance:
            assert out.variance is not None
            assert out.variance.shape == (2, 3, 5, self.design.gain_groups(M))

    def test_step_by_step_equals_sequence(self):
        """Decoding gives what a whole sequence gives."""
        problem = self.problem(T=6)
        out = problem.filter()
        state = problem.prior()
        for t in range(6):
            y, state = problem.step(state, t)
            assert_close(y, out.output[:, t], EXACT)
        assert_states_close(state, out.belief)

    def test_split_and_resume_equals_sequence(self):
        """A sequence in two parts, the state handed over."""
        problem = self.problem(T=7)
        whole = problem.filter(**self.options())
        first = problem.between(0, 3).filter(**self.options())
        second = problem.between(3, 7).filter(initial=first.belief, **self.options())
        assert_close(torch.cat([first.output, second.output], 1), whole.output, EXACT)
        assert_states_close(second.belief, whole.belief)
        assert first.log_evidence is not None
        assert second.log_evidence is not None
        assert_close(first.log_evidence + second.log_evidence, whole.log_evidence, EXACT)

    def test_packed_equals_separate(self):
        """Sequences packed into one row, an empty one among them."""
        bounds = [0, 3, 3, 4, 9]
        problem, initial = self.problem(B=1, T=9), self.state(B=4)
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
        packed = problem.filter(cu_seqlens=cu_seqlens, initial=initial, **self.options())
        for n, (start, end) in enumerate(pairwise(bounds)):
            own = map_state(lambda x, n=n: x[n : n + 1], initial)
            after = map_state(lambda x, n=n: x[n : n + 1], packed.belief)
            if start == end:  # nothing happens to the state of an empty sequence
                assert_states_close(after, own)
                continue
            alone = problem.between(start, end).filter(initial=own, **self.options())
            assert_close(packed.output[:, start:end], alone.output, EXACT)
            assert_states_close(after, alone.belief)
            assert packed.log_evidence is not None
            assert alone.log_evidence is not None
            assert_close(packed.log_evidence[n], alone.log_evidence[0], EXACT)
            if packed.variance is not None:
                assert_close(packed.variance[:, start:end], alone.variance, EXACT)

    def test_batch_entries_and_heads_are_independent(self):
        """Changing one head of one sequence changes nothing else."""
        problem = self.problem(B=2, H=2)
        before = problem.filter(**self.options())

        def disturb(x: Tensor) -> Tensor:
            changed = x.clone()
            changed[1, :, 1] = x[0, :, 0]
            return changed

        after = problem.map(disturb).filter(**self.options())
        for b, h in ((0, 0), (0, 1), (1, 0)):
            assert torch.equal(before.output[b, :, h], after.output[b, :, h])
            for (_, x), (_, y) in zip(named_tensors(before.belief), named_tensors(after.belief), strict=True):
                assert torch.equal(x[b, h], y[b, h])
        assert_close(after.output[1, :, 1], before.output[0, :, 0], EXACT)

    def test_output_sees_its_own_write_and_nothing_later(self):
        """Predict, write, read: in this order."""
        problem = self.problem(T=5)
        before = problem.filter().output
        changed = problem.v.clone()
        changed[:, 3] += 1.0
        after = replace(problem, v=changed).filter().output
        assert torch.equal(before[:, :3], after[:, :3])
        assert (before[:, 3] != after[:, 3]).all()

    def test_permuting_value_columns_permutes_outputs(self):
        """Within a noise group, value columns have no order."""
        problem = self.problem(M=8)
        order = torch.tensor([1, 0, 3, 2, 5, 4, 7, 6])
        if self.design.groups > 2:
            order = torch.arange(8).unflatten(0, (self.design.groups, -1)).flip(1).flatten()
        columns = {parameter.name for parameter in self.design.step_parameters if parameter.axes[-1:] == ("M",)}
        parameters = {n: x[..., order] if n in columns else x for n, x in problem.parameters.items()}
        permuted = replace(problem, v=problem.v[..., order], parameters=parameters)
        assert_close(permuted.filter().output, problem.filter().output[..., order], EXACT)

    def test_output_is_linear_in_the_values(self):
        """Gains depend on keys and variances alone: from a zero mean, outputs are linear in v."""
        if not self.linear_in_values:
            pytest.skip("the design's gains depend on values")
        problem = self.problem()
        doubled = replace(problem, v=2 * problem.v)
        assert_close(doubled.filter().output, 2 * problem.filter().output, EXACT)

    def test_gradients(self):
        """Autograd equals finite differences, for every input, through every output."""
        problem, initial = self.problem(B=1, T=3, H=1, D=2, M=4), self.state(B=1, H=1, D=2)
        names, parts = list(problem.parameters), dict(named_tensors(initial))
        form, symmetric = form_of(initial), {name for name, x in parts.items() if x.ndim > 4 and torch.equal(x, x.mT)}
        inputs = [problem.q, problem.k, problem.v, *problem.parameters.values(), *parts.values()]

        def outputs(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> list[Tensor]:
            parameters = dict(zip(names, rest[: len(names)], strict=True))
            state = dict(zip(parts, rest[len(names) :], strict=True))
            state = {name: (x + x.mT) / 2 if name in symmetric else x for name, x in state.items()}
            changed = replace(problem, q=q, k=k, v=v, parameters=parameters)
            out = changed.filter(initial=from_form(form, state, {}), **self.options())
            results = (
                out.output,
                *(x for _, x in named_tensors(unique(out.belief))),
                out.variance,
                out.write_log_evidence,
            )
            return [x for x in results if x is not None]

        inputs = [x.clone().requires_grad_() for x in inputs]
        assert torch.autograd.gradcheck(outputs, inputs, atol=1e-7, rtol=1e-6)

    def test_float32_stays_close_to_float64(self):
        """Within the table of docs/concepts/recurrence.md."""
        problem = self.problem(T=64, D=8)
        precise = problem.filter(**self.options())
        single = problem.map(lambda x: x.float()).filter(**self.options())
        assert single.output.dtype == torch.float32
        assert all(x.dtype == torch.float32 for _, x in named_tensors(single.belief))
        assert_within_table(single, precise)

    def test_autocast_leaves_states_alone(self):
        """States stay in float32 under torch.autocast."""
        problem = self.problem(T=9, dtype=torch.float32)
        expected = problem.filter(**self.options())
        with torch.autocast("cpu", torch.bfloat16):
            out = problem.filter(**self.options())
            y, _ = problem.step(expected.belief, 0)
        assert torch.equal(out.output, expected.output)
        assert_states_close(out.belief, expected.belief, 0.0)
        assert torch.equal(y, problem.step(expected.belief, 0)[0])

    def test_a_zero_key_writes_nothing(self):
        """What is written at the key 0 reaches nobody."""
        if not self.zero_keys_write_nothing:
            pytest.skip("this design writes at the key 0 as well")
        problem = self.problem(T=5)
        keys = problem.k.clone()
        keys[:, 2] = 0.0
        silent = replace(problem, k=keys)
        values = problem.v.clone()
        values[:, 2] = 100.0
        assert torch.equal(
            silent.filter(**self.options()).output,
            replace(silent, v=values).filter().output,
        )

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_inputs_keep_float32_states(self, dtype):
        """Outputs have the type of the inputs, states are float32."""
        problem = self.problem(T=5)
        rounded = problem.map(lambda x: x.to(dtype))
        out = rounded.filter(**self.options())
        assert out.output.dtype == dtype
        assert all(x.dtype == torch.float32 for _, x in named_tensors(out.belief))
        reference = rounded.map(lambda x: x.float()).filter(**self.options())
        torch.testing.assert_close(out.output, reference.output.to(dtype))

    def test_covariance_stays_symmetric_and_positive(self):
        """Of Gaussian beliefs that keep one, over 200 tokens in both types."""
        for dtype in (torch.float32, torch.float64):
            _assert_positive(self.problem(T=200, D=8, dtype=dtype).filter().belief)

    @pytest.mark.slow
    def test_65536_tokens_in_float32(self):
        """A long run neither drifts from float64 nor loses its covariance."""
        problem = replace(self.problem(B=1, H=1, T=65_536, D=8), options=self.filter_options())
        with torch.no_grad():
            precise = problem.filter(**self.options())
            single = problem.map(lambda x: x.float()).filter(**self.options())
        assert_within_table(single, precise, long=True)
        _assert_positive(single.belief)


def _assert_positive(state: Any) -> None:
    if isinstance(state, Belief) and state.covariance is not None:
        P = state.dense_covariance()
        assert torch.equal(P, P.mT)
        assert torch.linalg.eigvalsh(P.double()).min() > 0


def _with_gradients(problem: Problem, initial: Any, options: dict[str, bool]) -> dict[str, Tensor]:
    """Everything that a filter computes, and the gradients of a sum over all of it, by name."""
    inputs = {"q": problem.q, "k": problem.k, "v": problem.v, **problem.parameters}
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    state = map_state(lambda x: x.clone().requires_grad_(), initial)
    parameters = {name: leaves[name] for name in problem.parameters}
    changed = replace(problem, q=leaves["q"], k=leaves["k"], v=leaves["v"], parameters=parameters)
    out = changed.filter(initial=state, **options)
    results = {"output": out.output, "variance": out.variance, "evidence": out.write_log_evidence}
    results = {name: x for name, x in results.items() if x is not None} | dict(
        named_tensors(unique(out.belief), "belief")
    )
    every = {**leaves, **dict(named_tensors(state, "initial"))}
    total = sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)).sum() for x in results.values())
    assert isinstance(total, Tensor)
    gradients = torch.autograd.grad(total, list(every.values()), allow_unused=True)
    for (name, x), gradient in zip(every.items(), gradients, strict=True):
        gradient = torch.zeros_like(x) if gradient is None else gradient
        symmetric = x.ndim > 4 and torch.equal(x, x.mT)  # only the symmetric part has a meaning
        results[f"gradient of {name}"] = (gradient + gradient.mT) / 2 if symmetric else gradient
    return {name: x.detach() for name, x in results.items()}


def unique(state: Any) -> Any:
    """A state in a form that two equal ones share: a covariance kept as factors, which may be turned, as its matrix."""
    if isinstance(state, Belief):
        is_factored = isinstance(state.covariance, tuple)
        return Belief(state.mean, state.dense_covariance()) if is_factored else state
    if isinstance(state, tuple):
        return type(state)(*(unique(part) for part in state))
    return state


def assert_states_close(a: Any, b: Any, tolerance: float = EXACT) -> None:
    """Equal parts, and equal tensors to a tolerance."""
    ours, reference = dict(named_tensors(unique(a))), dict(named_tensors(unique(b)))
    assert ours.keys() == reference.keys()
    for name, x in ours.items():
        assert_close(x, reference[name], tolerance, name)


def assert_within_table(single: Filtered, precise: Filtered, long: bool = False) -> None:
    """Within the table `FLOAT32`; parts of other beliefs are held to the mean's row."""
    pairs = {
        "output": (single.output, precise.output),
        "variance": (single.variance, precise.variance),
        "write_log_evidence": (single.write_log_evidence, precise.write_log_evidence),
    }
    states = zip(named_tensors(unique(single.belief)), named_tensors(unique(precise.belief)), strict=True)
    pairs.update({name: (x, y) for (name, x), (_, y) in states})
    for name, (ours, reference) in pairs.items():
        if ours is not None:
            assert reference is not None
            distance = (ours.double() - reference).abs().max() / (1 + reference.abs().max())
            assert distance <= FLOAT32.get(name, FLOAT32["mean"])[long], name
