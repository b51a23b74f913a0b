"""What every design must pass. Inherit, set `design`, and dozens of checks come with it.

Every way to filter a design is held to the same class: `method`, `backend` and `chunk_size` say which.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from closeness import assert_close
from membydesign import Belief, DesignModel, Filtered, PerColumnReset
from problems import Problem, random_belief, random_problem

EXACT = 1e-12
"""Two ways to the same float64 numbers, over a few tokens."""

FLOAT32 = {
    # quantity: distance of a float32 filter from the float64 one over 64 and over 65,536 tokens, in units of one plus
    # the largest value; docs/recurrence.md has this table
    "output": (5e-6, 2e-5),
    "mean": (5e-6, 1e-5),
    "covariance": (2e-6, 5e-6),
    "variance": (2e-6, 5e-6),
    "write_log_evidence": (5e-6, 1e-5),
}


class DesignContract:
    """The contract of `filter_sequence` and `filter_step`, for one design."""

    design: ClassVar[DesignModel]
    method: ClassVar[str] = "recurrent"
    chunk_size: ClassVar[int | None] = None
    backend: ClassVar[str] = "torch"

    def options(self) -> dict[str, bool]:
        return {"return_variance": self.design.has_variance, "return_evidence": True}

    def problem(self, **sizes) -> Problem:
        problem = random_problem(self.design, **sizes)
        return replace(problem, options=self.way(chunk_size=self.chunk_size))

    def way(self, **options) -> dict[str, Any]:
        return {"method": self.method, "backend": self.backend, **options}

    def test_shapes_and_state_size(self):
        D, M = 6, 4
        out = self.problem(B=2, T=3, H=5, D=D, M=M).filter(**self.options())
        assert out.output.shape == (2, 3, 5, M)
        assert out.log_evidence is not None
        assert out.log_evidence.shape == (2, 5)
        declared = self.design.state_size(D, M)
        assert out.belief.mean[0, 0].numel() == declared.mean
        kept = 0 if out.belief.covariance is None else out.belief.covariance[0, 0].numel()
        assert kept == declared.covariance
        assert declared.total == declared.mean + declared.covariance
        if out.variance is not None:
            assert out.variance.shape == (2, 3, 5, self.design.gain_groups(M))

    def test_step_by_step_equals_sequence(self):
        problem = self.problem(T=6)
        out = problem.filter()
        belief = Belief.prior(self.design, 2, 2, 4, 4, dtype=torch.float64)
        for t in range(6):
            y, belief = problem.step(belief, t)
            assert_close(y, out.output[:, t], EXACT)
        assert_beliefs_close(belief, out.belief)

    def test_split_and_resume_equals_sequence(self):
        problem = self.problem(T=7)
        whole = problem.filter(**self.options())
        first = problem.between(0, 3).filter(**self.options())
        second = problem.between(3, 7).filter(initial=first.belief, **self.options())
        assert_close(torch.cat([first.output, second.output], 1), whole.output, EXACT)
        assert_beliefs_close(second.belief, whole.belief)
        assert first.log_evidence is not None
        assert second.log_evidence is not None
        assert_close(first.log_evidence + second.log_evidence, whole.log_evidence, EXACT)

    def test_packed_equals_separate(self):
        bounds = [0, 3, 3, 4, 9]
        problem, initial = self.problem(B=1, T=9), random_belief(self.design, B=4)
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
        packed = problem.filter(cu_seqlens=cu_seqlens, initial=initial, **self.options())
        for n, (start, end) in enumerate(pairwise(bounds)):
            own = initial.map(lambda x, n=n: x[n : n + 1])
            if start == end:  # nothing happens to the belief of an empty sequence
                assert_beliefs_close(packed.belief.map(lambda x, n=n: x[n : n + 1]), own)
                continue
            alone = problem.between(start, end).filter(initial=own, **self.options())
            assert_close(packed.output[:, start:end], alone.output, EXACT)
            assert_beliefs_close(packed.belief.map(lambda x, n=n: x[n : n + 1]), alone.belief)
            assert packed.log_evidence is not None
            assert alone.log_evidence is not None
            assert_close(packed.log_evidence[n], alone.log_evidence[0], EXACT)
            if packed.variance is not None:
                assert_close(packed.variance[:, start:end], alone.variance, EXACT)

    def test_batch_entries_and_heads_are_independent(self):
        problem = self.problem(B=2, H=2)
        before = problem.filter(**self.options())

        def disturb(x: Tensor) -> Tensor:
            changed = x.clone()
            changed[1, :, 1] = x[0, :, 0]
            return changed

        after = problem.map(disturb).filter(**self.options())
        for b, h in ((0, 0), (0, 1), (1, 0)):
            assert torch.equal(before.output[b, :, h], after.output[b, :, h])
            assert torch.equal(before.belief.mean[b, h], after.belief.mean[b, h])
        assert_close(after.output[1, :, 1], before.output[0, :, 0], EXACT)

    def test_output_sees_its_own_write_and_nothing_later(self):
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
        if self.design.write.groups > 2:
            order = torch.arange(8).unflatten(0, (self.design.write.groups, -1)).flip(1).flatten()
        parameters = dict(problem.parameters)
        if isinstance(self.design.covariance, PerColumnReset):
            parameters["prior_variance"] = parameters["prior_variance"][..., order]
        permuted = replace(problem, v=problem.v[..., order], parameters=parameters)
        assert_close(permuted.filter().output, problem.filter().output[..., order], EXACT)

    def test_output_is_linear_in_the_values(self):
        """Gains depend on keys and variances alone: from a zero mean, outputs are linear in v."""
        problem = self.problem()
        doubled = replace(problem, v=2 * problem.v)
        assert_close(doubled.filter().output, 2 * problem.filter().output, EXACT)

    def test_gradients(self):
        """Autograd equals finite differences, for every input, through every output."""
        problem = self.problem(B=1, T=3, H=1, D=2, M=4)
        initial = random_belief(self.design, B=1, H=1, D=2)
        names = list(problem.parameters)
        inputs = [problem.q, problem.k, problem.v, *problem.parameters.values(), *(x for x in initial if x is not None)]

        def outputs(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> list[Tensor]:
            parameters = dict(zip(names, rest[: len(names)], strict=True))
            mean, *covariance = rest[len(names) :]
            start = Belief(mean, *((c + c.mT) / 2 if c.ndim == 5 else c for c in covariance))
            out = replace(problem, q=q, k=k, v=v, parameters=parameters).filter(initial=start, **self.options())
            return [x for x in (out.output, *out.belief, out.variance, out.write_log_evidence) if x is not None]

        inputs = [x.clone().requires_grad_() for x in inputs]
        assert torch.autograd.gradcheck(outputs, inputs, atol=1e-7, rtol=1e-6)

    def test_float32_stays_close_to_float64(self):
        problem = self.problem(T=64, D=8)
        precise = problem.filter(**self.options())
        single = problem.map(lambda x: x.float()).filter(**self.options())
        assert single.output.dtype == single.belief.mean.dtype == torch.float32
        assert_within_table(single, precise)

    def test_autocast_leaves_states_alone(self):
        problem = self.problem(T=9, dtype=torch.float32)
        expected = problem.filter(**self.options())
        with torch.autocast("cpu", torch.bfloat16):
            out = problem.filter(**self.options())
            y, _ = problem.step(expected.belief, 0)
        assert torch.equal(out.output, expected.output)
        assert torch.equal(out.belief.mean, expected.belief.mean)
        assert torch.equal(y, problem.step(expected.belief, 0)[0])

    def test_a_zero_key_writes_nothing(self):
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
        problem = self.problem(T=5)
        rounded = problem.map(lambda x: x.to(dtype))
        out = rounded.filter(**self.options())
        assert out.output.dtype == dtype
        assert all(x.dtype == torch.float32 for x in out.belief if x is not None)
        reference = rounded.map(lambda x: x.float()).filter(**self.options())
        torch.testing.assert_close(out.output, reference.output.to(dtype))

    def test_covariance_stays_symmetric_and_positive(self):
        for dtype in (torch.float32, torch.float64):
            out = self.problem(T=200, D=8, dtype=dtype).filter()
            if out.belief.covariance is not None:
                P = out.belief.dense_covariance()
                assert torch.equal(P, P.mT)
                assert torch.linalg.eigvalsh(P.double()).min() > 0

    @pytest.mark.slow
    def test_65536_tokens_in_float32(self):
        """A long run neither drifts from float64 nor loses its covariance."""
        problem = replace(self.problem(B=1, H=1, T=65_536, D=8), options=self.way())
        with torch.no_grad():
            precise = problem.filter(**self.options())
            single = problem.map(lambda x: x.float()).filter(**self.options())
        assert_within_table(single, precise, long=True)
        if single.belief.covariance is not None:
            P = single.belief.dense_covariance()
            assert torch.equal(P, P.mT)
            assert torch.linalg.eigvalsh(P.double()).min() > 0


def assert_beliefs_close(a: Belief, b: Belief) -> None:
    assert_close(a.mean, b.mean, EXACT)
    assert (a.covariance is None) == (b.covariance is None)
    if a.covariance is not None:
        assert_close(a.covariance, b.covariance, EXACT)


def assert_within_table(single: Filtered, precise: Filtered, long: bool = False) -> None:
    pairs = {
        "output": (single.output, precise.output),
        "mean": (single.belief.mean, precise.belief.mean),
        "covariance": (single.belief.covariance, precise.belief.covariance),
        "variance": (single.variance, precise.variance),
        "write_log_evidence": (single.write_log_evidence, precise.write_log_evidence),
    }
    for name, (ours, reference) in pairs.items():
        if ours is not None:
            assert reference is not None
            distance = (ours.double() - reference).abs().max() / (1 + reference.abs().max())
            assert distance <= FLOAT32[name][long], name
