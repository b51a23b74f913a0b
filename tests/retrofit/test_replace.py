"""The student of a retrofit: what it inherits, where it starts, that it is a model like any other."""

import copy

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import fla_checkpoints as fla
from membydesign.layers import GatedDeltaNet, MemoryLayer
from membydesign.models import MemoryForCausalLM, load_fla
from membydesign.models.fla_config import memory_config
from membydesign.retrofit import nmse, replaced_layers, retrofit
from membydesign.testing import assert_close
from models.family import fresh_model, some_ids
from retrofit.tiny import mixer, teacher_of

TRANSITIONS = ("rotation", "rotation_real", "diagonal", "scalar")
INHERITED = ("q_proj", "k_proj", "v_proj", "o_proj", "g_proj", "o_norm")


def unit(x):
    return x / (x.square().sum() + 1e-6).sqrt()


def by_hand(old, x, *, convolution=True, fresh=False, gate=False):
    """What a Bayesian Layer with a teacher's weights makes of x, [T,hidden_size]: a loop over heads and tokens.

    Queries divided by √D and the norm's ε as in the teacher, which must come to the same as what the student does.
    """
    w, (T, _), H, D, M = dict(old.named_parameters()), x.shape, old.num_heads, old.key_dim, old.value_dim
    found = {}
    for name in "qkv":
        y = x @ w[f"{name}_proj.weight"].T
        if convolution and f"{name}_conv1d.weight" in w:
            taps = w[f"{name}_conv1d.weight"][:, 0]
            line = torch.cat((y.new_zeros(taps.shape[1] - 1, y.shape[1]), y))
            y = torch.stack([(line[t : t + taps.shape[1]].T * taps).sum(1) for t in range(T)])
        found[name] = F.silu(y) if convolution else y
    shared, steps, identity = H // old.num_key_heads, torch.logspace(-3, -1, H), torch.eye(D, dtype=x.dtype)
    rows = []
    for h in range(H):
        mean, covariance = x.new_zeros(D, M), identity
        keys = slice(h // shared * D, (h // shared + 1) * D)
        for t in range(T):
            q, k = unit(found["q"][t, keys]), unit(found["k"][t, keys])
            decay = (
                -steps[h]
                if fresh
                else -w["A_log"][h].exp() * F.softplus(x[t] @ w["a_proj.weight"][h] + w["dt_bias"][h])
            )
            closed = -x[t] @ w["b_proj.weight"][h]
            write_noise = 0.5 if fresh else closed.exp() if gate else F.softplus(closed) + 1e-4
            mean, covariance = decay.exp() * mean, (2 * decay).exp() * covariance + 0.05 * identity
            gain = covariance @ k / (write_noise + k @ covariance @ k)
            mean = mean + torch.outer(gain, found["v"][t, h * M : (h + 1) * M] - mean.T @ k)
            covariance = covariance - torch.outer(gain, covariance @ k)
            y = mean.T @ q / D**0.5
            y = y / (y.square().mean() + old.o_norm.eps).sqrt() * w["o_norm.weight"]
            if "g_proj.weight" in w:
                y = y * F.silu(w["g_proj.weight"][h * M : (h + 1) * M] @ x[t])
            rows.append((t, h, y))
    out = torch.stack([torch.cat([y for s, _, y in rows if s == t]) for t in range(T)])
    return out @ w["o_proj.weight"].T


TEACHERS = {
    "as released": {},
    "no gate": {"output_gate": False},
    "no convolution": {"short_convolution": None},
    "shared keys": {"num_key_heads": 1},
}


@pytest.mark.parametrize("convolution", ["keep", "drop"])
@pytest.mark.parametrize("transition", ["rotation", "diagonal", "scalar"])
@pytest.mark.parametrize("options", TEACHERS.values(), ids=TEACHERS)
def test_the_layer_is_a_filter_with_the_teachers_weights(options, transition, convolution):
    teacher = teacher_of(2, options=options)
    student = retrofit(teacher, [1], transition=transition, convolution=convolution)
    x = torch.randn(11, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = by_hand(mixer(teacher, 1), x, convolution=convolution == "keep")
    assert_close(mixer(student, 1)(x[None])[0][0], expected, 1e-10)


def test_the_write_noise_may_be_that_of_the_teachers_gate(tmp_path):
    teacher = teacher_of(2)
    student = retrofit(teacher, [1], write_noise="gate")
    x = 5 * torch.randn(11, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = by_hand(mixer(teacher, 1), x, gate=True)
    assert_close(mixer(student, 1)(x[None])[0][0], expected, 1e-10)
    student.save_pretrained(tmp_path)
    read = MemoryForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert_close(mixer(read, 1)(x[None])[0][0], expected, 1e-10)


@pytest.mark.parametrize("transition", ["diagonal", "scalar"])
def test_a_fresh_start_depends_on_no_input(transition):
    teacher = teacher_of(2)
    student = retrofit(teacher, [0], transition=transition, start="fresh")
    x = torch.randn(11, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_close(mixer(student, 0)(x[None])[0][0], by_hand(mixer(teacher, 0), x, fresh=True), 1e-6)


def test_rotations_of_real_rows_start_as_close_but_not_at_a_standstill():
    teacher = teacher_of(2)
    x = torch.randn(11, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    new = mixer(retrofit(teacher, [1], transition="rotation_real"), 1)
    y = new(x[None])[0]
    assert nmse(y, by_hand(mixer(teacher, 1), x)[None]) < 1e-3
    assert new.key_dim == 8
    assert new.state_size().covariance == 2 * 8 * 8
    y.square().sum().backward()
    assert (new.drift.A_angle.grad.abs().sum(1) > 0).all()


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_what_is_inherited_and_what_is_copied(transition):
    teacher = teacher_of()
    before = copy.deepcopy(teacher.state_dict())
    torch.manual_seed(5)
    state = torch.get_rng_state()
    student = retrofit(teacher, [2, 0], transition=transition)
    assert torch.equal(torch.get_rng_state(), state), "a retrofit draws nothing"
    assert replaced_layers(teacher, student) == [0, 2]
    for i, name in enumerate(student.config.layers):
        new, old = mixer(student, i), mixer(teacher, i)
        if i in (1, 3):
            assert name == "gated_deltanet"
            assert type(new) is GatedDeltaNet
            continue
        assert type(new) is MemoryLayer
        for part in (*INHERITED, "q_conv1d", "k_conv1d", "v_conv1d"):
            assert torch.equal(getattr(new, part).weight, getattr(old, part).weight), part
        assert new.o_norm.eps == pytest.approx(4 * old.o_norm.eps)
    ours, theirs = dict(student.named_parameters()), dict(teacher.named_parameters())
    copied = [name for name in theirs if name in ours]
    assert all(torch.equal(ours[name], theirs[name]) for name in copied)
    left_out = {name.rpartition("mixer.")[2] for name in theirs if name not in ours}
    assert left_out == {"a_proj.weight", "b_proj.weight", "A_log", "dt_bias"}
    assert not {p.data_ptr() for p in ours.values()} & {p.data_ptr() for p in theirs.values()}
    with torch.no_grad():
        for p in ours.values():
            p.add_(1)
    assert all(torch.equal(x, before[name]) for name, x in teacher.state_dict().items())


def test_dropped_convolutions_are_gone():
    student = retrofit(teacher_of(2), [0], convolution="drop")
    assert not mixer(student, 0).convolutions
    assert mixer(student, 0).state_size().convolution == 0
    assert not [name for name, _ in mixer(student, 0).named_parameters() if "conv" in name]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("transition", TRANSITIONS)
def test_it_is_saved_and_read_and_writes(transition, tied, tmp_path):
    teacher = teacher_of(dtype=torch.float32, tie_word_embeddings=tied)
    student = retrofit(teacher, [1, 3], transition=transition)
    assert (student.lm_head.weight is student.model.embeddings.weight) == tied
    ids = some_ids(2, 9)
    logits = student(ids).logits
    student.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is MemoryForCausalLM
    assert again.config.layers == student.config.layers
    assert torch.equal(again(ids).logits, logits)
    written = [model.generate(ids, max_new_tokens=5, do_sample=False) for model in (again, student)]
    assert written[0].shape == (2, 14)
    assert torch.equal(*written)
    cache, rows = None, []
    for t in range(9):
        out = student(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        rows.append(out.logits)
    assert_close(torch.cat(rows, 1), logits, 1e-4)


def test_all_layers_may_go_and_one_after_the_other():
    teacher = teacher_of(3)
    student = retrofit(teacher, [0, 1, 2])
    assert student.config.layer_options is not None
    assert set(student.config.layer_options) == {"bayesian_layer_rotating"}
    step_by_step = retrofit(retrofit(retrofit(teacher, [1]), [0]), [2])
    assert step_by_step.config.to_dict() == student.config.to_dict()
    assert torch.equal(step_by_step(some_ids(1, 9)).logits, student(some_ids(1, 9)).logits)
    with pytest.raises(ValueError, match="teacher: expected no bayesian_layer_rotating"):
        retrofit(retrofit(teacher, [0]), [1], convolution="drop")


def test_a_converted_checkpoint(tmp_path):
    options = {**fla.SMALL, "head_dim": 6}
    teacher = load_fla(fla.write(tmp_path, options, fla.tensors(options, december=True)))
    student = retrofit(teacher, [1])
    assert student.dtype == torch.float64
    assert not student.training
    assert mixer(student, 1).num_heads == 2
    assert student(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


BAD = {
    "none": ([], "layers: expected at least one index, got none"),
    "too large": ([1, 4], "layers: expected indices from 0 to 3, got 4"),
    "negative": ([-1], "layers: expected indices from 0 to 3, got -1"),
    "no number": (["1"], "layers: expected indices from 0 to 3, got '1'"),
    "twice": ([1, 2, 1], "layers: expected each index once, got 1 2 times"),
}


@pytest.mark.parametrize(("layers", "message"), BAD.values(), ids=BAD)
def test_bad_indices_are_refused(layers, message):
    with pytest.raises(ValueError, match=message):
        retrofit(teacher_of(), layers)


def test_other_bad_arguments_are_refused():
    teacher = teacher_of(2)
    with pytest.raises(ValueError, match="layers: .* GatedDeltaNet, got 1, where there is attention"):
        retrofit(fresh_model(["gated_deltanet", "attention"]), [1])
    with pytest.raises(ValueError, match="transition: expected one of rotation, .* got 'identity'"):
        retrofit(teacher, [0], transition="identity")  # pyright: ignore
    with pytest.raises(ValueError, match="convolution: expected one of keep, drop, got None"):
        retrofit(teacher, [0], convolution=None)  # pyright: ignore
    with pytest.raises(ValueError, match="start: expected one of teacher, fresh, got 'zero'"):
        retrofit(teacher, [0], start="zero")  # pyright: ignore
    with pytest.raises(ValueError, match="write_noise: expected one of softplus, gate, got 'exp'"):
        retrofit(teacher, [0], write_noise="exp")  # pyright: ignore
    with pytest.raises(ValueError, match=r"teacher: expected a MemoryForCausalLM, or one of .*, got MemoryModel"):
        retrofit(teacher.model, [0])
    with pytest.raises(ValueError, match="student: expected some layers that differ"):
        replaced_layers(teacher, copy.deepcopy(teacher))
    with pytest.raises(ValueError, match="student: expected 2 layers"):
        replaced_layers(teacher, teacher_of(3))
    with pytest.raises(ValueError, match="head_dim: expected an even D"):
        retrofit(teacher_of(2, head_dim=5), [0])


def test_the_papers_student_at_full_size():
    """Of 24 layers, 4 become Bayesian Layers with 4 heads whose covariances are 256×256."""
    with torch.device("meta"):
        teacher = MemoryForCausalLM(memory_config(fla.RELEASED))
    student = retrofit(teacher, [5, 11, 17, 23])
    assert [i for i, name in enumerate(student.config.layers) if name == "bayesian_layer_rotating"] == [5, 11, 17, 23]
    width, heads, size = 1024, 4, 256
    transition = heads * width + heads + 2 * heads * size // 2  # W_A, A_step; A_radius and A_angle of 128 pairs
    noises = 2 * (heads * width + heads)
    theirs = 2 * heads * width + 2 * heads  # a_proj, b_proj; A_log, dt_bias
    parameters = sum(p.numel() for p in student.parameters())
    assert parameters == 366_763_200 + 4 * (transition + noises - theirs) == 366_783_696
    for i in (5, 11, 17, 23):
        assert mixer(student, i).state_size().covariance == heads * size * size
