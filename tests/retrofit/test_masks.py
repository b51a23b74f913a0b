"""What is trained, name by name."""

import pytest
import torch

import fla_checkpoints as fla
from membydesign.models import MemoryForCausalLM
from membydesign.models.fla_config import memory_config
from membydesign.retrofit import freeze, phase_a_mask, phase_b_mask, retrofit
from retrofit.tiny import teacher_of

SHARED = ["q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "g_proj.weight", "o_norm.weight"]
TRANSITION = ["drift.W_A", "drift.A_step", "drift.A_radius", "drift.A_angle"]
NOISES = [f"noises.{name}.{part}" for name in ("process_noise", "write_noise") for part in ("weight", "bias")]
TEACHERS = ["a_proj.weight", "b_proj.weight", "A_log", "dt_bias"]
MLP = ["mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"]


def listed(layers, mixer, mlp=()):
    """A mask written out: parts of the mixers at 1, parts of the SwiGLU at 0.1."""
    names = {f"model.layers.{i}.mixer.{name}": 1.0 for i in layers for name in mixer}
    return names | {f"model.layers.{i}.{name}": 0.1 for i in layers for name in mlp}


@pytest.mark.parametrize("convolution", ["keep", "drop"])
def test_what_a_student_trains(convolution):
    student = retrofit(teacher_of(), [1, 3], convolution=convolution)
    assert phase_a_mask(student, [1, 3]) == listed([1, 3], [*SHARED, *TRANSITION, *NOISES])
    assert phase_b_mask(student, [1, 3]) == listed([1, 3], [*SHARED, *TRANSITION, *NOISES], MLP)


def test_what_the_control_trains():
    assert phase_a_mask(teacher_of(), [3, 1]) == listed([1, 3], [*SHARED, *TEACHERS])
    assert phase_b_mask(teacher_of(), [3, 1]) == listed([1, 3], [*SHARED, *TEACHERS], MLP)


def test_what_there_is_not_is_not_trained():
    bare = teacher_of(2, options={"output_gate": False}, intermediate_size=0)
    mixer = [name for name in SHARED if name != "g_proj.weight"]
    assert phase_b_mask(bare, [0]) == listed([0], [*mixer, *TEACHERS])
    scalar = retrofit(bare, [0], transition="scalar")
    assert phase_b_mask(scalar, [0]) == listed([0], [*mixer, *TRANSITION[:3], *NOISES])


def test_other_choices_for_the_swiglu():
    mask = phase_b_mask(teacher_of(), [2], mlp=("gate_proj", "down_proj"), mlp_multiplier=0.5)
    assert {name: x for name, x in mask.items() if "mlp" in name} == {
        "model.layers.2.mlp.gate_proj.weight": 0.5,
        "model.layers.2.mlp.down_proj.weight": 0.5,
    }
    assert phase_b_mask(teacher_of(), [2], mlp=()) == phase_a_mask(teacher_of(), [2])
    with pytest.raises(ValueError, match="mlp: expected names among gate_proj, up_proj, down_proj, got 'fc1'"):
        phase_b_mask(teacher_of(), [2], mlp=("fc1",))
    with pytest.raises(ValueError, match="mlp_multiplier: expected a number above 0, got 0"):
        phase_b_mask(teacher_of(), [2], mlp_multiplier=0)


def test_bad_indices_are_refused():
    with pytest.raises(ValueError, match="layers: expected indices from 0 to 3, got 9"):
        phase_a_mask(teacher_of(), [9])
    with pytest.raises(ValueError, match="layers: expected each index once, got 1 2 times"):
        phase_b_mask(teacher_of(), [1, 1])


def test_freezing():
    student = retrofit(teacher_of(), [1])
    student.requires_grad_(False)
    mask = phase_b_mask(student, [1])
    freeze(student, mask)
    assert {name for name, p in student.named_parameters() if p.requires_grad} == set(mask)
    freeze(student, {"model.norm.weight": 1.0})
    assert [name for name, p in student.named_parameters() if p.requires_grad] == ["model.norm.weight"]
    with pytest.raises(ValueError, match="mask: expected names of parameters of the model, got model.nothing"):
        freeze(student, {"model.norm.weight": 1.0, "model.nothing": 1.0})
    assert student.model.norm.weight.requires_grad, "a refused mask changes nothing"


def test_the_papers_masks_at_full_size():
    with torch.device("meta"):
        teacher = MemoryForCausalLM(memory_config(fla.RELEASED))
    layers = [5, 11, 17, 23]
    student = retrofit(teacher, layers)
    width, heads, pairs, inner, head = 1024, 4, 128, 2816, 256

    def trained(model, mask):
        freeze(model, mask)
        return sum(p.numel() for p in model.parameters() if p.requires_grad)

    projections = 5 * width * width + head  # q, k, v, o, g; o_norm
    fresh = (heads * width + heads + 2 * heads * pairs) + 2 * (heads * width + heads)
    gates = 2 * heads * width + 2 * heads
    swiglu = 3 * width * inner
    assert trained(student, phase_a_mask(student, layers)) == 4 * (projections + fresh) == 21_025_840
    assert trained(student, phase_b_mask(student, layers)) == 4 * (projections + fresh + swiglu) == 55_628_848
    assert trained(teacher, phase_b_mask(teacher, layers)) == 4 * (projections + gates + swiglu) == 55_608_352
    two = ("gate_proj", "down_proj")
    assert trained(student, phase_b_mask(student, layers, mlp=two)) == 4 * (projections + fresh + swiglu * 2 // 3)
