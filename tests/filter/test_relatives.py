"""Relatives: the contract, with references written from each paper and outside the recursion."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import math
from dataclasses import replace

import pytest
import torch

import membydesign as mbd
from membydesign.design import Identity
from membydesign.testing import DesignContract, assert_close, random_problem

WAYS = {"Recurrent": {"method": "recurrent"}, "Chunk": {"method": "chunk", "chunk_size": 4}}


def gaussian(error, variance):
    return -0.5 * (error.square() / variance + (2 * math.pi * variance).log())


def left_over(log_decay, t):
    """What tokens s ≤ t have left at t, [B,t+1,H], and what a prior has left, [B,H]."""
    left = torch.stack([log_decay[:, s + 1 : t + 1].sum(1).exp() for s in range(t + 1)], 1)
    return left, log_decay[:, : t + 1].sum(1).exp()


def regression(problem, ridge, mixed=lambda x, q, t: x):
    """Weighted least squares over the whole history, solved anew for every token: outputs and log evidence.

    `ridge(H, t)` is the diagonal of Λ, [B,H,D]; `mixed(x, q, t)` what reads the values.
    """
    q, k, v = problem.q, problem.k, problem.v
    outputs, evidence = [], q.new_zeros(())
    for t in range(q.shape[1]):
        left, _ = left_over(problem.parameters["log_decay"], t)
        weight = left / problem.parameters["write_noise"][:, : t + 1]
        H = torch.einsum("bsh,bshd,bshe->bshde", weight, k[:, : t + 1], k[:, : t + 1])
        U = torch.einsum("bsh,bshd,bshm->bshdm", weight, k[:, : t + 1], v[:, : t + 1])
        ridge_t = torch.diag_embed(ridge(H.sum(1), t))
        before = torch.linalg.inv(H[:, :t].sum(1) + ridge_t)
        P = torch.linalg.inv(H.sum(1) + ridge_t)
        x = torch.einsum("bhde,bhe->bhd", P, q[:, t])
        outputs.append(torch.einsum("bhd,bhdm->bhm", mixed(x, q[:, t], t), U.sum(1)))
        predicted = torch.einsum("bhd,bhde,bhem->bhm", k[:, t], before, U[:, :t].sum(1))
        variance = problem.parameters["write_noise"][:, t] + torch.einsum("bhd,bhde,bhe->bh", k[:, t], before, k[:, t])
        evidence = evidence + gaussian(v[:, t] - predicted, variance[..., None]).sum(-1)
    return torch.stack(outputs, 1), evidence


class Mesa(DesignContract):
    design = mbd.catalogue["mesa_net"]

    def oracle(self, problem):
        return regression(problem, lambda _, t: 1 / problem.parameters["prior_variance"][:, t])


class KalmaNet(DesignContract):
    design = mbd.catalogue["gated_kalmanet"]

    def oracle(self, problem):
        def ridge(H, t):
            del t
            return 0.02 * H.square().sum((-2, -1)).sqrt()[..., None].expand(H.shape[:-1])

        def mixed(x, q, t):
            a = problem.parameters["mixing"][:, t, :, None]
            return a * x + (1 - a) * q

        return regression(problem, ridge, mixed)


class Palimpsa(DesignContract):
    design = mbd.Palimpsa(precision=0.7)

    def oracle(self, problem):
        """Sums over the whole history of every entry apart; λ₀ is constant in time here, as the paper has it."""
        q, k, v, x = problem.q, problem.k, problem.v, problem.parameters
        outputs, evidence = [], q.new_zeros(())
        for t in range(q.shape[1]):
            left, of_start = left_over(x["log_decay"], t)
            faded = torch.cat([of_start[:, None], left], 1)  # what is left of the start, and after each write
            resting = x["prior_precision"][:, : t + 1]
            prior = of_start * self.design.precision + ((faded[:, 1:] - faded[:, :-1]) * resting).sum(1)
            information = torch.einsum("bsh,bshd,bshm->bshdm", left, k[:, : t + 1], (v / x["write_noise"])[:, : t + 1])
            importance = torch.einsum(
                "bsh,bshd,bshm->bshdm", left, k[:, : t + 1].square(), (1 / x["write_noise"])[:, : t + 1]
            )
            before = importance[:, :t].sum(1) + prior[..., None, None]
            mean = information[:, :t].sum(1) / before
            key = k[:, t, :, :, None]
            noise = x["write_noise"][:, t, :, None]
            evidence = evidence + gaussian(v[:, t, :, None] - key * mean, noise + key.square() / before).sum((-2, -1))
            after = information.sum(1) / (importance.sum(1) + prior[..., None, None])
            outputs.append(torch.einsum("bhd,bhdm->bhm", q[:, t], after))
        return torch.stack(outputs, 1), evidence


class KLA(DesignContract):
    design = mbd.catalogue["kla"]

    def oracle(self, problem):
        """Condition the joint Gaussian of one entry at all times on what it observed, for every entry."""
        q, k, v, x = problem.q, problem.k, problem.v, problem.parameters
        B, T, H, D = q.shape
        M = v.shape[-1]
        key = k[..., None].expand(B, T, H, D, M)
        cov = torch.zeros(B, H, D, M, T, T, dtype=q.dtype)
        decay = x["log_decay"].exp()
        before = torch.ones(B, H, D, M, dtype=q.dtype)
        for t in range(T):
            cov[..., :t, t] = decay[:, t, ..., None] * cov[..., :t, t - 1] if t else cov[..., :t, t]
            before = decay[:, t].square() * before + x["process_noise"][:, t]
            cov[..., t, t] = before
            cov[..., t, :t] = cov[..., :t, t]
        keys, values = key.movedim(1, -1), v[:, :, :, None].expand_as(key).movedim(1, -1)
        noise = x["write_noise"][:, :, :, None].expand_as(key).movedim(1, -1)
        joint = keys[..., :, None] * cov * keys[..., None, :] + torch.diag_embed(noise)
        outputs = []
        for t in range(T):
            seen = joint[..., : t + 1, : t + 1]
            cross = cov[..., t, : t + 1] * keys[..., : t + 1]
            mean = (cross * torch.linalg.solve(seen, values[..., : t + 1])).sum(-1)
            outputs.append(torch.einsum("bhd,bhdm->bhm", q[:, t], mean))
        zero = torch.zeros(T, dtype=q.dtype)
        density = torch.distributions.MultivariateNormal(zero, joint).log_prob(values)
        return torch.stack(outputs, 1), density.sum((-2, -1))


class VLA(DesignContract):
    design = mbd.catalogue["vla"]
    linear_in_values = True

    def oracle(self, problem):
        """The affine map of every write, composed; penalties are inverted anew."""
        q, k, v, u = problem.q, problem.k, problem.v, problem.parameters["penalty"]
        _, T, _, D = q.shape
        eye = torch.eye(D, dtype=q.dtype)
        inverses = [eye.expand(*q.shape[:1], q.shape[2], D, D) * self.design.prior_variance]
        for t in range(T):
            B = torch.einsum("bshd,bshe->bhde", u[:, : t + 1], u[:, : t + 1]) + eye / self.design.prior_variance
            inverses.append(torch.linalg.inv(B))
        M = torch.zeros(*q.shape[:1], q.shape[2], D, v.shape[-1], dtype=q.dtype)
        outputs, evidence = [], q.new_zeros(())
        for t in range(T):
            g = torch.nn.functional.normalize(torch.einsum("bhde,bhe->bhd", inverses[t + 1], k[:, t]), dim=-1)
            variance = 1 + torch.einsum("bhd,bhde,bhe->bh", k[:, t], inverses[t], k[:, t])
            error = v[:, t] - torch.einsum("bhd,bhdm->bhm", k[:, t], M)
            evidence = evidence + gaussian(error, variance[..., None]).sum(-1)
            erase = eye - g[..., :, None] * k[:, t, :, None, :]
            M = erase @ M + g[..., :, None] * v[:, t, :, None, :]
            outputs.append(torch.einsum("bhd,bhdm->bhm", q[:, t], M))
        return torch.stack(outputs, 1), evidence


class KalmanDelta(DesignContract):
    """The recurrences of the paper, with its letters: c precision, κ gain, ω process noise, r write noise."""

    isotropic = False

    def oracle(self, problem):
        q, k, v, x = problem.q, problem.k, problem.v, problem.parameters
        D, groups = q.shape[-1], self.design.groups
        alpha, omega, r = x["log_decay"].exp(), x["process_noise"], x["write_noise"].reshape(*q.shape[:3], -1)
        if alpha.ndim == 3:
            alpha = alpha[..., None]
        outputs, evidence = [], q.new_zeros(())
        c = torch.ones(*q[:, 0].shape[:2], groups, 1 if self.isotropic else D, dtype=q.dtype)
        S = torch.zeros(*q[:, 0].shape, v.shape[-1], dtype=q.dtype)
        for t in range(q.shape[1]):
            key, noise = k[:, t, :, None], r[:, t, :, :, None]
            if self.isotropic:
                z = alpha[:, t].square().mean(-1)[..., None, None] / c + omega[:, t, :, None, None]
                c = 1 / z + key.square().sum(-1, keepdim=True) / noise
            else:
                z = alpha[:, t, :, None].square() / c + omega[:, t, :, None]
                c = 1 / z + D * key.square() / noise
            kappa = z * key / (noise + (z * key.square()).sum(-1, keepdim=True))
            S = alpha[:, t, ..., None] * S
            error = v[:, t] - torch.einsum("bhd,bhdm->bhm", k[:, t], S)
            variance = noise[..., 0] + (z * key.square()).sum(-1)
            each = variance.repeat_interleave(v.shape[-1] // groups, -1)
            evidence = evidence + gaussian(error, each).sum(-1)
            S = S + torch.cat(
                [kappa[:, :, g, :, None] * error.unflatten(-1, (groups, -1))[:, :, g, None, :] for g in range(groups)],
                -1,
            )
            outputs.append(torch.einsum("bhd,bhdm->bhm", q[:, t], S))
        return torch.stack(outputs, 1), evidence


class Diagonal(KalmanDelta):
    design = mbd.catalogue["kalman_delta_diagonal"]


class Isotropic(KalmanDelta):
    design = mbd.catalogue["kalman_delta_isotropic"]
    isotropic = True


class IsotropicInGroups(KalmanDelta):
    design = mbd.DesignModel(mbd.ScalarDecay(), mbd.ObserveMemory(groups=2), mbd.Isotropic())
    isotropic = True


class DiagonalInGroups(KalmanDelta):
    design = mbd.DesignModel(mbd.ScalarDecay(), mbd.ObserveMemory(groups=2), mbd.InformationDiagonal())


TURNING = {  # no oracle outside: approximations, in chunks equal to the loop
    "IsotropicTurning": mbd.DesignModel(mbd.DampedRotation(noise="real"), mbd.ObserveMemory(), mbd.Isotropic(2.0, 1.5)),
    "IsotropicStationary": mbd.DesignModel(
        mbd.Stationary(mbd.DiagonalDecay()), mbd.ObserveMemory(groups=2), mbd.Isotropic(1.3, 2.0)
    ),
    "DiagonalTurning": mbd.DesignModel(mbd.DampedRotation(), mbd.ObserveMemory(), mbd.InformationDiagonal(2.0, 1.5)),
}
CASES = {case.__name__: case for case in (Mesa, KalmaNet, KLA, Palimpsa, VLA, Diagonal, Isotropic)}
CASES.update({case.__name__: case for case in (IsotropicInGroups, DiagonalInGroups)})
CASES.update({name: type(name, (DesignContract,), {"design": design}) for name, design in TURNING.items()})
for _name, _case in CASES.items():
    for _way, _options in WAYS.items():
        _linear = isinstance(_case.design, mbd.DesignModel)
        _kernels = _name in ("Diagonal", "Isotropic")  # tested in both ways; others in chunks, or in the loop alone
        if _kernels or (_way == "Chunk") == _linear:
            _skip = {"test_every_kernel_equals_the_loop": None} if _kernels and _way == "Chunk" else {}
            globals()[f"Test{_name}{_way}"] = type(f"Test{_name}{_way}", (_case,), {**_options, **_skip})


RELATIVES = ("mesa_net", "gated_kalmanet", "kla", "palimpsa", "kalman_delta_isotropic", "kalman_delta_diagonal", "vla")


@pytest.mark.parametrize("name", RELATIVES)
def test_descriptions_are_complete_and_typeset(name):
    from matplotlib.mathtext import MathTextParser

    design = mbd.catalogue[name]
    description = design.describe()
    text = str(description)
    assert design.exactness in text
    assert "arXiv:" in design.citation
    for parameter in design.step_parameters:
        assert f"{parameter.name} = {parameter.symbol}" in text
    parser = MathTextParser("path")
    for _, equations in description.parts:
        for equation in equations:
            parser.parse(f"${equation.latex}$")


@pytest.mark.parametrize("drift", ["static", "isotropic prior"])
def test_mesa_net_without_fading_is_the_kalman_filter_of_a_static_memory(drift):
    """γ = 1 and λ constant: the dense filter with P₀ = diag(λ), r² = 1/β and no process noise."""
    problem = random_problem(mbd.catalogue["mesa_net"], T=30, D=6, M=5)
    q, k, v, noise = problem.q, problem.k, problem.v, problem.parameters["write_noise"]
    variances = torch.tensor([0.3, 2.0, 1.0, 0.7, 4.0, 0.1]) if drift == "static" else torch.full((6,), 0.7)
    variances = variances.double()
    options = {"return_variance": True, "return_evidence": True}
    ours = mbd.filter_sequence(
        problem.design, q, k, v, log_decay=0.0, write_noise=noise, prior_variance=variances.expand_as(q), **options
    )
    static = mbd.DesignModel(Identity(), mbd.ObserveMemory(), mbd.Dense())
    start = mbd.Belief(torch.zeros(2, 2, 6, 5).double(), variances.diag().expand(2, 2, 1, 6, 6).clone())
    dense = mbd.filter_sequence(static, q, k, v, process_noise=0.0, write_noise=noise, initial=start, **options)
    for a, b in ((ours.output, dense.output), (ours.variance, dense.variance), (ours.log_evidence, dense.log_evidence)):
        assert_close(a, b, 1e-10)
    precision = ours.belief.keys + (1 / variances).diag()
    assert_close(torch.linalg.inv(precision), dense.belief.covariance[:, :, 0], 1e-10)
    assert_close(torch.linalg.solve(precision, ours.belief.values), dense.belief.mean, 1e-10)


def test_mesa_net_with_fading_is_a_kalman_filter_whose_drift_follows_its_covariance():
    """P̄⁻¹ = γP⁻¹ + (1 − γ)Λ is A P Aᵀ + Q with A = γ P̄ P⁻¹ and Q ⪰ 0: fading is a drift towards the prior."""
    torch.manual_seed(0)
    X = torch.randn(200, 6, 6).double()
    P, gamma = torch.linalg.inv(X @ X.mT + torch.eye(6)), torch.rand(200, 1, 1).double()
    ridge = torch.diag_embed(torch.rand(200, 6).double() + 0.2)
    P = torch.linalg.inv(torch.linalg.inv(P) + ridge)
    predicted = torch.linalg.inv(gamma * torch.linalg.inv(P) + (1 - gamma) * ridge)
    A = gamma * predicted @ torch.linalg.inv(P)
    Q = predicted - A @ P @ A.mT
    assert torch.linalg.eigvalsh((Q + Q.mT) / 2).min() > 0


def test_vla_with_its_own_key_as_penalty_is_recursive_least_squares():
    problem = random_problem(mbd.PenalisedLeastSquares(prior_variance=0.7, unit_gain=False), T=30, D=6, M=5)
    options = {"return_variance": True, "return_evidence": True}
    ours = mbd.filter_sequence(problem.design, problem.q, problem.k, problem.v, penalty=problem.k, **options)
    static = mbd.DesignModel(Identity(), mbd.ObserveMemory(), mbd.Dense(prior=0.7))
    exact = mbd.filter_sequence(static, problem.q, problem.k, problem.v, process_noise=0.0, write_noise=1.0, **options)
    for a, b in ((ours.output, exact.output), (ours.variance, exact.variance), (ours.log_evidence, exact.log_evidence)):
        assert_close(a, b, 1e-10)
    assert_close(ours.belief.inverse_penalty, exact.belief.covariance[:, :, 0], 1e-10)


def test_one_row_leaves_nothing_to_throw_away():
    """With D = 1 every covariance is dense: KLA, both Kalman delta networks and the Bayesian Layer are one filter."""
    sizes = {"T": 12, "D": 1, "M": 3}
    problem = random_problem(mbd.catalogue["bayesian_layer"], **sizes)
    options = {"return_variance": True}
    expected = problem.filter(**options)
    x = problem.parameters
    for name in ("kalman_delta_isotropic", "kalman_delta_diagonal", "kla"):
        parameters = dict(x)
        if name == "kla":
            parameters["log_decay"] = x["log_decay"][..., None].expand(*x["log_decay"].shape, 3)
            parameters["write_noise"] = x["write_noise"][..., 0]
        out = mbd.filter_sequence(mbd.catalogue[name], problem.q, problem.k, problem.v, **parameters, **options)
        assert_close(out.output, expected.output, 1e-11, name)
        assert_close(out.variance, expected.variance.expand_as(out.variance), 1e-11, name)


def test_precision_is_counted_as_often_as_it_says():
    """c = 1 keeps the diagonal (the mean) of the exact posterior precision after one write from a diagonal prior."""
    problem = random_problem(mbd.catalogue["bayesian_layer"], T=1, D=5)
    parameters = dict(problem.parameters)
    exact = torch.linalg.inv(problem.filter().belief.covariance)
    for kind in (mbd.InformationDiagonal, mbd.Isotropic):
        design = mbd.DesignModel(mbd.ScalarDecay(), mbd.ObserveMemory(), kind(times_counted=1.0))
        parameters["log_decay"] = torch.zeros_like(problem.parameters["process_noise"])
        same = replace(problem, parameters={**problem.parameters, "log_decay": torch.zeros_like(problem.q)})
        exact = torch.linalg.inv(same.filter().belief.covariance)
        kept = mbd.filter_sequence(design, problem.q, problem.k, problem.v, **parameters).belief.covariance
        diagonal = exact.diagonal(dim1=-2, dim2=-1)
        assert_close(1 / kept, diagonal if kind is mbd.InformationDiagonal else diagonal.mean(-1), 1e-10)


def test_palimpsa_where_the_prior_dominates_is_gated_linear_attention():
    problem = random_problem(mbd.Palimpsa(precision=1e9), T=20)
    x = {**problem.parameters, "prior_precision": 1e9}
    out = mbd.filter_sequence(problem.design, problem.q, problem.k, problem.v, **x)
    additive = mbd.filter_sequence(
        mbd.catalogue["mamba2"],
        problem.q,
        problem.k,
        problem.v / x["write_noise"],
        log_decay=x["log_decay"],
        prior_variance=1.0,
        write_noise=0.0,
    )
    assert_close(1e9 * out.output, additive.output, 1e-6)


def test_gated_kalmanet_without_mixing_is_gated_linear_attention():
    problem = random_problem(mbd.catalogue["gated_kalmanet"], T=20)
    x = problem.parameters
    out = mbd.filter_sequence(problem.design, problem.q, problem.k, problem.v, **{**x, "mixing": 0.0})
    additive = mbd.filter_sequence(
        mbd.catalogue["mamba2"],
        problem.q,
        problem.k,
        problem.v / x["write_noise"][..., None],
        log_decay=x["log_decay"],
        prior_variance=1.0,
        write_noise=0.0,
    )
    assert_close(out.output, additive.output, 1e-11)


def test_before_anything_is_written_a_ridge_of_nothing_is_one():
    problem = random_problem(mbd.catalogue["gated_kalmanet"], T=3)
    k = problem.k.clone()
    k[:, :2] = 0.0
    k.requires_grad_()
    out = replace(problem, k=k).filter(return_variance=True)
    assert_close(out.output[:, :2], torch.zeros_like(out.output[:, :2]), 0.0)
    assert_close(out.variance[:, :2, :, 0], problem.q[:, :2].square().sum(-1), 1e-12)
    out.output.sum().backward()
    assert torch.isfinite(k.grad).all()


def test_lost_sums_are_told_with_their_place():
    """A ridge far below the rounding of H: the matrix is not positive definite in float32, and nobody gets a NaN."""
    torch.manual_seed(0)
    k = torch.randn(1, 400, 1, 8) * torch.tensor([1.0] * 4 + [0.0] * 4) * 1e3
    k = k @ torch.linalg.qr(torch.randn(8, 8)).Q
    q, v = torch.randn(1, 400, 1, 8), torch.randn(1, 400, 1, 4)
    with pytest.raises(mbd.NotPositiveDefiniteError, match=r"float32 at batch 0, position \d+, head 0"):
        mbd.filter_sequence(mbd.catalogue["mesa_net"], q, k, v, log_decay=0.0, write_noise=1e-4, prior_variance=1e6)
