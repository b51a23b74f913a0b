"""The relatives in full: the layer contract, and loops written from the published layers, in float64.

The loops take weights by name and know nothing of a layer or a filter. Where an implementation by others is installed,
it is asked too.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false

import importlib.util
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import membydesign as mbd
from layers.contract import WIDTH, LayerContract, shaken, tokens
from layers.test_against_papers import convolution, length_one
from membydesign.layers import (
    KLA,
    DiagonalKalmanDelta,
    GatedKalmaNet,
    IsotropicKalmanDelta,
    MesaNet,
    PalimpsaLayer,
    VariationalLinearAttention,
    make_layer,
)
from membydesign.testing import assert_close, random_problem

H, D, M, T = 2, 8, 6, 40
CASES = {
    "mesa_net": lambda: MesaNet(WIDTH, H, D, value_dim=M, output_gate=True),
    "mesa_net_without_convolution": lambda: MesaNet(WIDTH, H, D, short_convolution=None),
    "gated_kalmanet": lambda: GatedKalmaNet(WIDTH, H, D, value_dim=M),
    "kla": lambda: KLA(WIDTH, 1, D),
    "kla_with_heads": lambda: KLA(WIDTH, 3, D, value_dim=5, short_convolution=None),
    "palimpsa": lambda: PalimpsaLayer(WIDTH, H, D, value_dim=M, importance_rank=5),
    "kalman_delta_isotropic": lambda: IsotropicKalmanDelta(WIDTH, H, D, value_dim=M),
    "kalman_delta_diagonal": lambda: DiagonalKalmanDelta(WIDTH, H, D, value_dim=M),
    "vla": lambda: VariationalLinearAttention(WIDTH, H, D, value_dim=M),
}
NAMES = ("mesa_net", "gated_kalmanet", "kla", "palimpsa", "kalman_delta_isotropic", "kalman_delta_diagonal", "vla")
for _name, _make in CASES.items():
    globals()[f"Test_{_name}"] = type(f"Test_{_name}", (LayerContract,), {"make": staticmethod(_make)})


def heads(x, n=H):
    return x.unflatten(-1, (n, -1))


def rms_norm(x, weight, eps=1e-5):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def linear(weights, name, x):
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def mapped(weights, name, x):
    return heads(convolution(weights, f"{name}_conv1d", linear(weights, f"{name}_proj", x)))


def ridge_regression(q, k, v, decay, weight, ridge, mixing=None):
    """H and U of every token, and a solve: the regression of MesaNet and Gated KalmaNet."""
    Hs, U, reads = q.new_zeros(len(q), H, D, D), q.new_zeros(len(q), H, D, v.shape[-1]), []
    for t in range(q.shape[1]):
        g, b = decay[:, t, :, None, None], weight[:, t, :, None, None]
        Hs = g * Hs + b * k[:, t, :, :, None] * k[:, t, :, None, :]
        U = g * U + b * k[:, t, :, :, None] * v[:, t, :, None, :]
        x = torch.linalg.solve(Hs + torch.diag_embed(ridge(Hs)), q[:, t])
        x = x if mixing is None else q[:, t] + mixing[:, t, :, None] * (x - q[:, t])
        reads.append(torch.einsum("bhd,bhdm->bhm", x, U))
    return torch.stack(reads, 1)


def mesa_net(w, x):
    q, k, v = length_one(mapped(w, "q", x)), length_one(mapped(w, "k", x)), heads(linear(w, "v_proj", x))
    decay, beta = linear(w, "a_proj", x).sigmoid(), linear(w, "b_proj", x).sigmoid()
    ridge = (0.25 + F.softplus(w["lambda_params"])).view(H, D)
    y = rms_norm(ridge_regression(q, k, v, decay, beta, lambda _: ridge), w["o_norm.weight"])
    return linear(w, "o_proj", y.flatten(-2) * F.silu(linear(w, "g_proj", x)))


def gated_kalmanet(w, x):
    q, k, v = length_one(mapped(w, "q", x)), length_one(mapped(w, "k", x)), mapped(w, "v", x)
    beta = linear(w, "b_proj", x).sigmoid()[..., None] + 1e-6
    k, v = beta * k, beta * v
    decay = (-w["A_log"].exp() * F.softplus(linear(w, "a_proj", x) + w["dt_bias"])).exp()

    def ridge(Hs):
        return (0.02 * torch.linalg.matrix_norm(Hs))[..., None].expand(*Hs.shape[:-1])

    y = ridge_regression(q, k, v, decay, torch.ones_like(decay), ridge, linear(w, "alpha_proj", x).sigmoid())
    y = rms_norm(y / math.sqrt(D), w["o_norm.weight"], 1e-6)
    return linear(w, "o_proj", y.flatten(-2) * F.silu(linear(w, "g_proj", x)))


def palimpsa(w, x):
    q, k, inner = length_one(mapped(w, "q", x)) / math.sqrt(D), length_one(mapped(w, "k", x)), mapped(w, "v", x)
    gate = linear(w, "bs_proj", x).sigmoid()[..., None]
    v = inner * gate
    b = heads(linear(w, "b_proj", linear(w, "b_rank_proj", x))).sigmoid() * F.softplus(w["b_scale"])[:, None] * gate
    decay = (-F.softplus(linear(w, "dt_proj", x) + w["dt_bias"]) * w["A_log"].exp()).exp()
    mu, importance, reads = x.new_zeros(len(x), H, D, v.shape[-1]), torch.ones(()).to(x), []
    for t in range(x.shape[1]):
        g, key = decay[:, t, :, None, None], k[:, t, :, :, None]
        information = key * v[:, t, :, None, :] + g * mu * importance
        importance = b[:, t, :, None, :] * key.square() + (1 - g) + g * importance
        mu = information / importance
        reads.append(torch.einsum("bhd,bhdm->bhm", q[:, t], mu))
    y = rms_norm(torch.stack(reads, 1) + inner * w["D"][:, None], w["o_norm.weight"])
    return linear(w, "o_proj", y.flatten(-2) * F.silu(linear(w, "g_proj", x)))


def kalman_delta(w, x):
    q, k, v = length_one(mapped(w, "q", x)) / math.sqrt(D), length_one(mapped(w, "k", x)), mapped(w, "v", x)
    f = linear(w, "f_b_proj", linear(w, "f_a_proj", x)) + w["dt_bias"]
    alpha = (-w["A_log"].exp()[:, None] * heads(F.softplus(f))).exp()
    r = 0.01 + F.softplus(linear(w, "r_proj", x))[..., None]
    c = (0.1 + F.softplus(w["initial_precision_param"]))[:, None]
    isotropic = "omega_proj.weight" in w
    omega = (
        linear(w, "omega_proj", x)
        if isotropic
        else F.linear(linear(w, "omega_a_proj", x), w["omega_weight"], w["omega_bias"])
    )
    omega = F.softplus(omega)[..., None] if isotropic else heads(F.softplus(omega))
    S, reads = x.new_zeros(len(x), H, D, v.shape[-1]), []
    for t in range(x.shape[1]):
        if isotropic:
            length = k[:, t].square().sum(-1, keepdim=True)  # one, but for an ε
            z = alpha[:, t].square().mean(-1, keepdim=True) / c + omega[:, t]
            gain, c = z / (r[:, t] + z * length) * k[:, t], 1 / z + length / r[:, t]
        else:
            z = alpha[:, t].square() / c + omega[:, t]
            gain = z * k[:, t] / (r[:, t] + (z * k[:, t].square()).sum(-1, keepdim=True))
            c = 1 / z + D * k[:, t].square() / r[:, t]
        S = alpha[:, t, ..., None] * S
        S = S + gain[..., None] * (v[:, t] - torch.einsum("bhd,bhdm->bhm", k[:, t], S))[..., None, :]
        reads.append(torch.einsum("bhd,bhdm->bhm", q[:, t], S))
    y = rms_norm(torch.stack(reads, 1), w["o_norm.weight"]).flatten(-2)
    return linear(w, "o_proj", y * linear(w, "g_b_proj", linear(w, "g_a_proj", x)).sigmoid())


def kla(w, x):
    z, gate = linear(w, "in_proj", x).chunk(2, -1)
    z = convolution(w, "conv1d", z)
    inner = z.shape[-1]
    v, s, k, q = linear(w, "sensor_proj", z).split([inner, inner, D, D], -1)
    k, q, value_precision = length_one(k), length_one(q), 1 / (F.softplus(s) + 1e-4)
    a, delta = -w["lambda_log"][0].exp(), F.softplus(w["delta"][0]) + 1e-7
    p = w["process_noise"][0].clamp_min(1e-7) / (2 * a.abs()) * (1 - (2 * a * delta).exp())
    a = (delta * a).exp()
    precision, information, reads = torch.ones_like(a), torch.zeros_like(a), []
    for t in range(x.shape[1]):
        spread = a.square() + p * precision
        precision = precision / spread + k[:, t, :, None].square() * value_precision[:, t, None]
        information = a / spread * information + k[:, t, :, None] * (v * value_precision)[:, t, None]
        reads.append(torch.einsum("bd,bdm->bm", q[:, t], information / precision))
    return linear(w, "out_proj", (torch.stack(reads, 1) + w["lambda_skip"] * z) * F.silu(gate))


def vla(w, x):
    """With the denominator zᵀq of the authors' code, which the norm takes out again but for its ε."""
    raw, v = linear(w, "k_proj", x), heads(linear(w, "v_proj", x))
    q, features = heads(F.elu(linear(w, "q_proj", x)) + 1), heads(F.elu(raw) + 1)
    u = F.normalize(heads(linear(w, "u_proj", raw)), dim=-1) / math.sqrt(D)
    k = F.normalize(features, dim=-1)
    A = torch.eye(D).to(x).expand(len(x), H, D, D) / 10
    S, z, reads = x.new_zeros(len(x), H, D, v.shape[-1]), x.new_zeros(len(x), H, D), []
    for t in range(x.shape[1]):
        Au = torch.einsum("bhde,bhe->bhd", A, u[:, t])
        A = A - Au[..., :, None] * Au[..., None, :] / (1 + (u[:, t] * Au).sum(-1))[..., None, None]
        alpha = F.normalize(torch.einsum("bhde,bhe->bhd", A, k[:, t]), dim=-1)
        error = v[:, t] - torch.einsum("bhd,bhdm->bhm", k[:, t], S)
        S, z = S + alpha[..., None] * error[..., None, :], z + features[:, t]
        reads.append(torch.einsum("bhd,bhdm->bhm", q[:, t], S) / (z * q[:, t]).sum(-1, keepdim=True))
    y = F.layer_norm(torch.stack(reads, 1), (v.shape[-1],), w["norm.weight"], w["norm.bias"], 1e-30)
    return linear(w, "o_proj", y.flatten(-2))


LOOPS = {
    "mesa_net": mesa_net,
    "gated_kalmanet": gated_kalmanet,
    "kla": kla,
    "palimpsa": palimpsa,
    "kalman_delta_isotropic": kalman_delta,
    "kalman_delta_diagonal": kalman_delta,
    "vla": vla,
}


@pytest.mark.parametrize("name", LOOPS)
def test_equals_a_loop_written_from_the_published_layer(name):
    """Outputs, and gradients of the input and of all weights."""
    layer = shaken(CASES[name]()).double()
    if name == "vla":
        layer.norm.eps = 1e-30
    x, weights = tokens(2, T).requires_grad_(), dict(layer.named_parameters())
    ours, theirs = layer(x)[0], LOOPS[name](weights, x)
    assert_close(ours, theirs, 1e-6 if name in ("kla", "vla") else 1e-9)  # unit() has an ε of its own
    probe = tokens(2, T, seed=9)
    for a, b in zip(
        torch.autograd.grad((ours * probe).sum(), [x, *weights.values()]),
        torch.autograd.grad((theirs * probe).sum(), [x, *weights.values()]),
        strict=True,
    ):
        assert_close(a, b, 1e-5 if name in ("kla", "vla") else 1e-8)


def file_of(package, path):
    """A module of an installed package, by its file: packages that need a GPU cannot be imported whole."""
    spec = importlib.util.find_spec(package)
    file = Path(next(iter(spec.submodule_search_locations))) / path if spec else None
    if file is None or not file.exists():
        pytest.skip(f"{package} with {path} is not installed")
    pytest.importorskip("einops")
    module = importlib.util.spec_from_file_location(f"naive_{package}", file)
    loaded = importlib.util.module_from_spec(module)
    try:
        module.loader.exec_module(loaded)
    except ImportError as error:  # of the package, which needs Triton
        pytest.skip(f"{file.name} cannot be loaded by itself: {error}")
    return loaded


def test_mesa_net_equals_flash_linear_attention():
    """Its exact solve, in float32; values of another size than keys are not supported there."""
    naive = file_of("fla", "ops/mesa_net/naive.py")
    problem = random_problem(mbd.catalogue["mesa_net"], T=60, H=2, D=8, M=8, dtype=torch.float32)
    x, ridge = problem.parameters, 0.25 + torch.rand(2, 8)
    ours = mbd.filter_sequence(
        problem.design,
        problem.q,
        problem.k,
        problem.v,
        **{**x, "prior_variance": (1 / ridge).expand_as(problem.q)},
    )
    y, keys, values = naive.naive_mesa_net_exact(
        problem.q, problem.k, problem.v, x["log_decay"], ridge, 1 / x["write_noise"]
    )
    assert_close(ours.output, y, 2e-5)
    assert_close(ours.belief.keys, keys, 2e-6)
    assert_close(ours.belief.values, values, 2e-6)


@pytest.mark.parametrize("name", ["gka", "iso_kdn", "diag_kdn"])
def test_newer_relatives_equal_flash_linear_attention(name):
    """Its naive references, where the installed version has them."""
    naive = file_of("fla", f"ops/{name}/naive.py")
    row = {"gka": "gated_kalmanet", "iso_kdn": "kalman_delta_isotropic", "diag_kdn": "kalman_delta_diagonal"}[name]
    problem = random_problem(mbd.catalogue[row], T=60, H=2, D=8, M=8, dtype=torch.float32)
    x = problem.parameters
    noise = x["write_noise"].view(2, 60, 2)
    if name == "gka":
        scale = noise.rsqrt()[..., None]
        y, _ = naive.naive_recurrent_gka(
            problem.q, problem.k * scale, problem.v * scale, x["log_decay"], x["log_decay"], x["mixing"], scale=1.0
        )
    else:
        run = getattr(naive, f"naive_recurrent_{name}")
        y, _ = run(problem.q, problem.k, problem.v, x["log_decay"], x["process_noise"], noise, scale=1.0)
    assert_close(problem.filter().output, y, 2e-5)


@pytest.mark.parametrize("decoding", [False, True])
def test_kla_equals_the_authors_package(decoding):
    """Its own layer in float64 with our weights: outputs, and variances of the scan."""
    theirs = pytest.importorskip("kla")
    ours = shaken(make_layer("kla", WIDTH, 1, D)).double()
    with torch.no_grad():
        ours.process_noise.abs_()
    layer = theirs.KLALayer(WIDTH, theirs.KLAConfig(d_state=D, backend="torch", scan_impl="sequential")).double()
    weights = {name.replace("conv1d", "conv"): p for name, p in ours.state_dict().items()}
    for name in ("delta", "lambda_log", "process_noise"):
        weights[name] = weights[name][0].T
    weights["lambda_skip"] = weights["lambda_skip"][0]
    layer.load_state_dict(weights)
    x = tokens(2, 30)
    with torch.no_grad():
        if decoding:
            state, outputs = layer.init_state(2, dtype=torch.float64), []
            for t in range(30):
                y, state = layer(x[:, t : t + 1], state=state)
                outputs.append(y)
            y = torch.cat(outputs, 1)
        else:
            y = layer(x)
        assert_close(ours(x)[0], y, 1e-5)


def test_names_and_styles_have_the_design_of_the_catalogue():
    for name in NAMES:
        assert make_layer(name, WIDTH, H, D).design == mbd.catalogue[name]
        assert make_layer(f"{name}_style", WIDTH, H, D).design == mbd.catalogue[name]
