"""Models with given addresses, against the paper's equations written out in loops."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from membydesign.data.recall import Collisions
from membydesign.data.seeds import generator
from membydesign.experiments.shared.addressed import COMPARED, UPDATES, AddressedModel, losses
from membydesign.experiments.shared.addressed_sweep import Choice


def build(update, *, query_writes=False, seed=0) -> Any:
    torch.manual_seed(seed)
    model = AddressedModel(UPDATES[update], 33, 16, query_writes=query_writes).double()
    with torch.no_grad():  # gates and noises start from constants: make them depend on the stream
        for name, p in model.named_parameters():
            if "noises" in name or "row_gate" in name:
                p.add_(0.3 * torch.randn_like(p))
    return model


def batch(n_f=2):
    found = Collisions().sample(3, n_f, (0.6, 0.9), generator("addressed", n_f))
    unit = F.normalize(found.addresses.double(), dim=-1)  # a gate is a delta rule's strength if keys have length one
    return found._replace(tokens=found.tokens.double(), addresses=unit)


def rms(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def softplus(x):
    return torch.log1p(torch.exp(x))


def updated(update, mixer, h, M, P, k, v, head):
    """One write of one head: the rows of the paper's table of compared updates."""
    eye = torch.eye(16, dtype=h.dtype)

    def variance(name):
        noise = mixer.noises[name]
        return softplus(noise.weight[head] @ h + noise.bias[head]) + 1e-4

    if update == "linear_attention":
        return M + torch.outer(k, v), P
    if update == "gla_style":
        rows = slice(16 * head, 16 * head + 16)
        gate = torch.sigmoid(mixer.row_gate.weight[rows] @ h + mixer.row_gate.bias[rows])
        return gate[:, None] * M + torch.outer(k, v), P
    if update == "deltanet_style":
        noise = mixer.noises["write_noise"]
        beta = torch.sigmoid(noise.weight[head] @ h + noise.bias[head])
        return M + beta * torch.outer(k, v - M.T @ k), P
    if update.startswith("covariance_reset"):
        predicted = (variance("prior_variance") if update.endswith("learned") else 0.05) * eye
    else:
        predicted = P + variance("process_noise") * eye
    u = predicted @ k
    beta = 1 / (0.05 + k @ u)
    P = predicted - beta * torch.outer(u, u)
    if "diagonal" in update:
        P = torch.diag(torch.diag(P))
    return M + beta * torch.outer(u, v - M.T @ k), P


def by_hand(update, model, tokens, addresses, queries, query_writes):
    """Logits of one sequence at its queries, token by token, with every layer in full."""
    h = tokens @ model.embedding.weight.T + model.embedding.bias
    for mixer, mlp, n1, n2 in zip(model.mixers, model.mlps, model.mixer_norms, model.mlp_norms, strict=True):
        x = rms(h, n1.weight)
        read = torch.zeros(len(h), 64, dtype=h.dtype)
        for head in range(4):
            rows = slice(16 * head, 16 * head + 16)
            M, P = torch.zeros(16, 16, dtype=h.dtype), 3.0 * torch.eye(16, dtype=h.dtype)
            for t in range(len(h)):
                v = mixer.v_proj.weight[rows] @ x[t]
                if query_writes or t < len(h) - queries:
                    M, P = updated(update, mixer, x[t], M, P, addresses[t], v, head)
                elif update == "gla_style":
                    gate = torch.sigmoid(mixer.row_gate.weight[rows] @ x[t] + mixer.row_gate.bias[rows])
                    M = gate[:, None] * M  # time passes, and nothing is written
                read[t, rows] = M.T @ addresses[t]
        h = h + read @ mixer.o_proj.weight.T
        y = rms(h, n2.weight)
        h = h + (F.silu(y @ mlp.gate_proj.weight.T) * (y @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
    return (rms(h, model.norm.weight) @ model.head.weight.T + model.head.bias)[-queries:]


@pytest.mark.parametrize("query_writes", [False, True])
@pytest.mark.parametrize("update", [*COMPARED, "covariance_reset_learned"])
def test_the_model_is_the_paper_s_equations(update, query_writes):
    model, found = build(update, query_writes=query_writes), batch()
    with torch.no_grad():
        ours = model.answer(found)
        for i in range(2):
            expected = by_hand(update, model, found.tokens[i], found.addresses[i], 8, query_writes)
            torch.testing.assert_close(ours[i], expected, rtol=1e-9, atol=1e-10)


def test_capacities_are_matched():
    counts = {u: sum(p.numel() for p in AddressedModel(UPDATES[u], 33, 16).parameters()) for u in UPDATES}
    assert counts["bayesian_layer"] == counts["deltanet_style"] == counts["covariance_reset_learned"]
    assert counts["bayesian_layer"] == counts["bayesian_layer_diagonal"]
    gates = 2 * 4 * (64 + 1)  # one scalar for each of 4 heads in 2 layers
    assert counts["bayesian_layer"] - counts["linear_attention"] == gates
    assert counts["covariance_reset"] == counts["linear_attention"]
    assert counts["gla_style"] - counts["linear_attention"] == 2 * 64 * (64 + 1)


def fresh(update) -> Any:
    return AddressedModel(UPDATES[update], 33, 16)


def test_states_are_the_paper_s():
    for update in COMPARED:
        mixer = fresh(update).mixers[0]
        size = mixer.design.state_size(16, 16)
        assert size.mean == 256
        assert size.covariance == {"bayesian_layer": 256, "bayesian_layer_diagonal": 16}.get(update, 0)


@pytest.mark.parametrize("update", COMPARED)
def test_gradients_reach_every_parameter(update):
    model, found = build(update), batch(n_f=1)
    inputs = {"tokens": found.tokens, "addresses": found.addresses, "answers": found.answers}
    losses(model, inputs).sum().backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert missing == []


def test_without_a_last_norm_the_readout_sees_how_strongly_memories_answer():
    found, sizes = batch(n_f=1), {}
    for update in ("bayesian_layer", "bayesian_layer_unnormed"):
        model, sizes[update] = build(update), []
        for factor in (1.0, 10.0):
            for block in (model.mixers[-1].o_proj, model.mlps[-1].down_proj):
                block.weight.data.mul_(factor)
            sizes[update].append(model.answer(found).std(-1).mean().item())
    assert sizes["bayesian_layer_unnormed"][1] > 2 * sizes["bayesian_layer_unnormed"][0]
    assert sizes["bayesian_layer"][1] < 1.5 * sizes["bayesian_layer"][0]
    assert Choice("bayesian_layer_diagonal_unnormed").default == "bayesian_layer_diagonal"


def test_starting_values():
    x = torch.randn(2, 3, 64)
    model = fresh("bayesian_layer")
    torch.testing.assert_close(model.mixers[0].noises["process_noise"](x), torch.full((2, 3, 4), 0.05))
    model = fresh("bayesian_layer_from_069")
    torch.testing.assert_close(
        model.mixers[0].noises["process_noise"](x), torch.full((2, 3, 4), 0.6931), rtol=1e-4, atol=0
    )
    model = fresh("gla_style")
    torch.testing.assert_close(torch.sigmoid(model.mixers[0].row_gate(x)), torch.full((2, 3, 64), 0.99))
    model = fresh("deltanet_style")
    torch.testing.assert_close(1 / (1 + model.mixers[0].noises["write_noise"](x)), torch.full((2, 3, 4), 0.5))
