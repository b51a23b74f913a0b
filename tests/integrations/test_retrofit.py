"""Transformers models with Bayesian layers: what they inherit, a filter written by hand, saving, generation, errors."""

import copy
import itertools

import pytest
import torch

pytest.importorskip("transformers")
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from integrations.tiny_models import tiny, tokens
from membydesign.integrations.transformers import accelerate
from membydesign.retrofit import retrofit

TEACHERS = ("qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear")
OPTIONS = [
    {"process_noise": process_noise, "write_noise": write_noise}
    for process_noise, write_noise in itertools.product(("learned", "stationary"), ("gate", "softplus"))
]


def teacher_of(family, **more):
    if family == "olmo_hybrid":
        more = {"linear_allow_neg_eigval": False, **more}
    return tiny(family, **more)


def mixer(model, layer=0):
    block = model.model.layers[layer]
    return block.linear_attn if hasattr(block, "linear_attn") else block.self_attn


def recorded(teacher, ids, **inputs):
    """What the teacher's delta rule is given and what its layer returns, without any of our code."""
    layer, seen = mixer(teacher), {}
    module = __import__(type(layer).__module__, fromlist=["x"])
    name = next(n for n in ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention") if hasattr(module, n))
    original = getattr(module, name)

    def record(query, key, value, g, beta, **kwargs):
        seen.update(q=query, k=key, v=value, g=g, beta=beta)
        return original(query, key, value, g=g, beta=beta, **kwargs)

    setattr(module, name, record)
    try:
        teacher(ids, use_cache=False, **inputs)
    finally:
        setattr(module, name, original)
    return seen


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def by_hand(seen, x, layer, process_noise, write_noise):
    """The Kalman filter with a full covariance, token by token, in float64."""
    q, k, v, g, beta = (seen[name].double() for name in ("q", "k", "v", "g", "beta"))
    (B, T, H), D = v.shape[:3], k.shape[-1]
    q, k = unit(q) * D**-0.5, unit(k)
    # from Transformers 5.23 on, the function repeats the heads of q and k itself
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    rates = g if g.ndim == 4 else g[..., None].expand(B, T, H, D)
    out = torch.zeros(v.shape, dtype=torch.float64)
    for b, h in itertools.product(range(B), range(H)):
        M, P = torch.zeros(D, v.shape[-1]).double(), torch.eye(D).double()
        for t in range(T):
            A = rates[b, t, h].exp().diag()
            if process_noise == "stationary":
                Q = torch.eye(D).double() - A @ A.T
            else:
                w, c = layer.process_noise.weight[h].double(), layer.process_noise.bias[h].double()
                Q = (F.softplus(x[b, t].double() @ w + c) + 1e-4) * torch.eye(D).double()
            gate = beta[b, t, h]
            noise = 1 / gate - k[b, t, h].square().sum() if write_noise == "gate" else 1e-4 - gate.log()
            M, P = A @ M, A @ P @ A.T + Q
            gain = P @ k[b, t, h] / (noise + k[b, t, h] @ P @ k[b, t, h])
            M = M + torch.outer(gain, v[b, t, h] - M.T @ k[b, t, h])
            P = P - torch.outer(gain, P @ k[b, t, h])
            out[b, t, h] = M.T @ q[b, t, h]
    return out


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o.values()))
@pytest.mark.parametrize("family", TEACHERS)
@torch.no_grad()
def test_the_layer_is_a_filter_on_the_teachers_projections(family, options):
    """The filter's part of the layer equals a Kalman filter on what the teacher hands to its delta rule."""
    teacher, ids = teacher_of(family), tokens(2, 9)
    student = retrofit(teacher, [0], transition="diagonal" if family == "kimi_linear" else "scalar", **options)
    layer, inputs, outputs = mixer(student), [], []
    if options["process_noise"] == "learned":
        layer.process_noise.weight.normal_()  # else it would not depend on the input
    norm = layer.norm if hasattr(layer, "norm") else layer.o_norm
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: inputs.append(kwargs["hidden_states"]), with_kwargs=True
        ),
        norm.register_forward_pre_hook(lambda _, args: outputs.append(args[0])),
    ]
    student(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    expected = by_hand(recorded(teacher, ids), inputs[0], layer, **options)
    assert (outputs[0].reshape(expected.shape) - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("family", TEACHERS)
@torch.no_grad()
def test_everything_inherited_is_equal_at_step_0(family):
    """All weights; the first token exactly; and every token where keys are orthogonal, as in a model of one token."""
    teacher, ids = teacher_of(family), tokens(3, 1)
    student = retrofit(teacher, [0], process_noise="stationary", write_noise="gate")
    weights = dict(student.named_parameters())
    for name, p in teacher.named_parameters():
        assert torch.equal(weights.pop(name), p)
        assert weights.get(name) is not p
    assert all(name.rpartition(".")[2] in ("angle", "row_rate") for name in weights)
    ours, theirs = student(ids).logits, teacher(ids).logits
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()
    more = tokens(3, 6)
    assert (student(more).logits - teacher(more).logits).abs().max() > 1e-3  # then a covariance makes a difference


@pytest.mark.parametrize("family", TEACHERS)
def test_it_trains_generates_and_makes_the_round_trip(family, tmp_path):
    teacher, ids = teacher_of(family), tokens(2, 12)
    student = retrofit(teacher, [0])
    before = copy.deepcopy(student.state_dict())
    optimizer = torch.optim.SGD(student.parameters(), 0.05)
    student.train()
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = student(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    changed = {name for name, x in student.state_dict().items() if not torch.equal(x, before[name])}
    new = {name for name, _ in mixer(student).named_parameters()} - {
        name for name, _ in mixer(teacher).named_parameters()
    }
    assert new
    assert all(any(name.endswith(part) for name in changed) for part in new)
    student.eval()

    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    text = student.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)
    with torch.no_grad():  # the cache and the padding change nothing: the whole text at once, without padding
        alone = student(text[:1, 4:], use_cache=False).logits[0, 7:-1]
        assert torch.equal(alone.argmax(-1), text[0, 12:])
        student.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert type(again) is type(student)
        assert again.config.bayesian_layers == [0]
        assert torch.equal(again(ids).logits, student(ids).logits)


@pytest.mark.parametrize("family", TEACHERS)
def test_a_hybrid_is_accelerated_around_its_bayesian_layers(family):
    kinds = {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "num_hidden_layers": 3}
    if family == "kimi_linear":
        kinds["mlp_layer_types"] = ["dense"] * 3
    student, ids = retrofit(teacher_of(family, **kinds), [1]), tokens(2, 11)
    with torch.no_grad():
        theirs = student(ids).logits
        with accelerate(student) as acceleration:
            ours = student(ids).logits
    assert len(acceleration.layers) == 1
    assert ".0." in acceleration.layers[0]
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@torch.no_grad()
def test_transitions_start_as_the_teachers_decay():
    teacher, ids = teacher_of("qwen3_next"), tokens(2, 10)
    logits = [retrofit(teacher, [0], transition=name)(ids).logits for name in ("scalar", "diagonal", "rotation")]
    for other in logits[1:]:
        assert (other - logits[0]).abs().max() <= 1e-4 * logits[0].abs().max()


def test_what_is_refused():
    teacher, kimi = teacher_of("qwen3_next"), teacher_of("kimi_linear")
    for layers, message in (
        ([], "layers: expected at least one index, got none"),
        ([2], "layers: expected indices from 0 to 1, got 2"),
        ([0, 0], "layers: expected each index once, got 0 2 times"),
        ([1], "layers: expected indices of a Qwen3NextGatedDeltaNet, got 1, where there is full_attention"),
    ):
        with pytest.raises(ValueError, match=message):
            retrofit(teacher, layers)
    with pytest.raises(
        ValueError, match=r"teacher: expected a MemoryForCausalLM, or one of Transformers' Qwen3Next.*got"
    ):
        retrofit(tiny("mamba2"), [0])
    with pytest.raises(ValueError, match="transition: expected \"diagonal\" for KDA, .* got 'rotation'"):
        retrofit(kimi, [0], transition="rotation")
    with pytest.raises(
        ValueError, match="transition: expected rotation, diagonal or scalar for a model of Transformers"
    ):
        retrofit(teacher, [0], transition="rotation_real")
    with pytest.raises(ValueError, match="convolution: expected \"keep\" for a model of Transformers, got 'drop'"):
        retrofit(teacher, [0], convolution="drop")
    with pytest.raises(ValueError, match="process_noise: expected one of learned, stationary, got 'none'"):
        retrofit(teacher, [0], process_noise="none")  # pyright: ignore[reportArgumentType]
