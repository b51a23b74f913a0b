"""What distillation descends, against formulas written out."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from membydesign.models import next_token_losses, token_cross_entropies, token_divergences
from membydesign.retrofit import (
    LossWeights,
    freeze,
    mean_cosine,
    nmse,
    phase_a_losses,
    phase_a_mask,
    phase_b_loss,
    phase_b_mask,
    recorded,
    retrofit,
)
from membydesign.testing import assert_close
from models.family import some_ids
from retrofit.tiny import batches, mixer, teacher_of

LAYERS = [1, 3]
WEIGHTS = LossWeights(0.8, 0.2)


def pair(**more):
    teacher = teacher_of()
    return teacher, retrofit(teacher, LAYERS, **more)


def inputs_of(model, ids):
    """The input of each mixer, from the residual stream before its block."""
    states = model(ids, output_hidden_states=True).hidden_states
    return [block.mixer_norm(x) for block, x in zip(model.model.layers, states, strict=False)]


def slow_nmse(y, target):
    """Of one row."""
    y, target = y.flatten().tolist(), target.flatten().tolist()
    mean = sum(target) / len(target)
    variance = sum((b - mean) ** 2 for b in target) / len(target)
    return sum((a - b) ** 2 for a, b in zip(y, target, strict=True)) / len(y) / (variance + 1e-6)


def slow_cosine(y, target):
    """Of one row."""
    return sum((a @ b / (a.norm() * b.norm())).item() for a, b in zip(y, target, strict=True)) / len(y)


def test_parts_of_the_loss():
    y, target = torch.randn(2, 2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    target = 3 + 0.1 * target
    rows = [*zip(y, target, strict=True)]
    assert nmse(y, target).tolist() == pytest.approx([slow_nmse(*row) for row in rows], rel=1e-12)
    assert mean_cosine(y, target).tolist() == pytest.approx([slow_cosine(*row) for row in rows], rel=1e-12)
    means = target.mean((1, 2), keepdim=True).expand_as(target)
    assert nmse(means, target).tolist() == pytest.approx([1, 1], abs=1e-3)
    assert not nmse(target, target).any()
    assert mean_cosine(2 * target, target).tolist() == pytest.approx([1, 1])
    assert nmse(y.bfloat16(), target.bfloat16()).dtype == torch.float32


def test_phase_a_against_the_formula():
    teacher, student = pair()
    ids = some_ids(2, 8)
    found = phase_a_losses(teacher, student, {"input_ids": ids})
    assert found.layers == (1, 3)
    for n, i in enumerate(LAYERS):
        x = inputs_of(teacher, ids)[i]
        y, target = mixer(student, i)(x)[0], mixer(teacher, i)(x)[0]
        for b, row in enumerate(zip(y, target, strict=True)):
            assert found.nmse[n, b].item() == pytest.approx(slow_nmse(*row), rel=1e-9)
            assert found.cosine[n, b].item() == pytest.approx(slow_cosine(*row), rel=1e-9)
            expected = slow_nmse(*row) + 0.05 * (1 - slow_cosine(*row))
            assert found.losses[n, b].item() == pytest.approx(expected, rel=1e-9)


def test_phase_a_of_a_perfect_student_is_zero():
    teacher, student = pair()
    for i in LAYERS:
        student.model.layers[i].mixer = copy.deepcopy(mixer(teacher, i))
    found = phase_a_losses(teacher, student, {"input_ids": some_ids(2, 8)})
    assert_close(found.losses, torch.zeros(2, 2, dtype=torch.float64), 1e-12)


@pytest.mark.parametrize("matched", ["tokens", "layer_inputs"])
def test_phase_b_against_the_formula(matched):
    teacher, student = pair()
    ids = some_ids(2, 8)
    found = phase_b_loss(teacher, student, {"input_ids": ids}, WEIGHTS, matched=matched, slice_size=3)
    p, q = teacher(ids).logits.softmax(-1), student(ids).logits.softmax(-1)
    kl = (p * (p / q).log()).sum(-1).mean(-1)
    assert_close(found.kl, kl, 1e-10)
    theirs = inputs_of(teacher, ids)
    ours = inputs_of(student, ids) if matched == "tokens" else theirs
    for b in range(2):
        outputs = [(mixer(student, i)(ours[i])[0][b], mixer(teacher, i)(theirs[i])[0][b]) for i in LAYERS]
        each = [slow_nmse(*both) for both in outputs]
        assert found.nmse[:, b].tolist() == pytest.approx(each, rel=1e-9)
        assert found.losses[b].item() == pytest.approx(0.8 * kl[b].item() + 0.2 / 2 * sum(each), rel=1e-9)


def test_what_is_matched_matters_behind_a_replaced_layer_only():
    teacher, student = pair()
    batch = {"input_ids": some_ids(2, 8)}
    first, second = (phase_b_loss(teacher, student, batch, WEIGHTS, matched=m).nmse for m in ("tokens", "layer_inputs"))
    assert_close(first[0], second[0], 1e-10)
    assert ((first[1] - second[1]).abs() > 1e-4 * second[1]).all()
    assert_close(second, phase_a_losses(teacher, student, batch).nmse, 1e-10)
    with pytest.raises(ValueError, match='matched: expected "tokens" or "layer_inputs", got None'):
        phase_b_loss(teacher, student, batch, WEIGHTS, matched=None)  # pyright: ignore


def test_padding_and_packing_change_nothing():
    teacher, student = pair()
    padded, packed = (batches()[name] for name in ("padded", "packed"))
    assert_close(
        phase_a_losses(teacher, student, padded).losses, phase_a_losses(teacher, student, packed).losses, 1e-10
    )
    for matched in ("tokens", "layer_inputs"):
        one, two = (phase_b_loss(teacher, student, b, WEIGHTS, matched=matched) for b in (padded, packed))
        assert_close(one.kl, two.kl, 1e-10)
        assert_close(one.nmse, two.nmse, 1e-10)
    one, two = (next_token_losses(teacher, b) for b in (padded, packed))
    assert one.shape == (7 + 4 + 9 - 3,)
    assert_close(one, two, 1e-10)
    ids = packed["input_ids"]
    assert_close(two.mean(), teacher(ids, labels=ids, cu_seqlens=packed["cu_seqlens"]).loss.double(), 1e-6)


def test_the_control_is_next_token_cross_entropy():
    model, ids = teacher_of(), some_ids(3, 8)
    found = next_token_losses(model, {"input_ids": ids}, slice_size=4)
    log_p = model(ids).logits.log_softmax(-1)
    slow = [-log_p[b, t, ids[b, t + 1]] for b in range(3) for t in range(7)]
    assert_close(found, torch.stack(slow), 1e-10)
    bounds = torch.tensor([0, 0, 5, 5, 8, 8])
    packed = next_token_losses(model, {"input_ids": ids[:1], "cu_seqlens": bounds})
    assert packed.shape == (4 + 2,), "empty sequences count for nothing"


def assert_same_gradients(found, expected, leaves, weights, tolerance):
    """Of weighted sums of losses, for weights that are all the same and for others."""
    for each in (weights, torch.full_like(weights, 0.3)):
        ours, theirs = (torch.autograd.grad(x @ each, leaves, retain_graph=True) for x in (found, expected))
        for one, other in zip(ours, theirs, strict=True):
            assert_close(one, other, tolerance)


@pytest.mark.parametrize("slice_size", [1, 4, 11, 100])
def test_divergences_are_those_of_full_logits(slice_size):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 11, 5, dtype=torch.float64, generator=generator)
    head, other = torch.randn(2, 30, 5, dtype=torch.float64, generator=generator)
    for tensor in (y, other):
        tensor.requires_grad_()
    found = token_divergences(x, y, head, other, slice_size=slice_size)
    p, q = ((a @ b.T).log_softmax(-1) for a, b in ((x, head), (y, other)))
    assert_close(found, F.kl_div(q, p, reduction="none", log_target=True).sum(1), 1e-12)
    categorical = [torch.distributions.Categorical(logits=z) for z in (p, q)]
    expected = torch.distributions.kl_divergence(*categorical)
    assert_close(found, expected, 1e-12)
    weights = torch.randn(11, dtype=torch.float64, generator=generator)
    assert_same_gradients(found, expected, (y, other), weights, 1e-12)


@pytest.mark.parametrize("leaves", ["hidden", "head", "both"])
@pytest.mark.parametrize("slice_size", [1, 4, 11, 100])
def test_cross_entropies_are_those_of_full_logits(slice_size, leaves):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(11, 5, dtype=torch.float64, generator=generator)
    head = torch.randn(30, 5, dtype=torch.float64, generator=generator)
    targets = torch.randint(30, (11,), generator=generator)
    trained = {"hidden": (x,), "head": (head,), "both": (x, head)}[leaves]
    for tensor in trained:
        tensor.requires_grad_()
    found = token_cross_entropies(x, targets, head, slice_size=slice_size)
    expected = F.cross_entropy(x @ head.T, targets, reduction="none")
    assert_close(found, expected, 1e-12)
    assert_same_gradients(
        found, expected, trained, torch.randn(11, dtype=torch.float64, generator=generator), tolerance=1e-12
    )
    with torch.no_grad():
        assert_close(token_cross_entropies(x, targets, head, slice_size=slice_size), expected, 1e-12)


def test_large_logits_do_not_overflow():
    x, head = 1e3 * torch.eye(3, requires_grad=True), torch.eye(3)
    losses = token_cross_entropies(x, torch.tensor([0, 1, 0]), head)
    assert losses.tolist() == [0, 0, 1000]
    (by_x,) = torch.autograd.grad(losses.sum(), x)
    assert by_x.tolist() == [[0, 0, 0], [0, 0, 0], [-1, 0, 1]]


@pytest.mark.parametrize("precision", ["autocast", "bfloat16"])
def test_half_precision_losses_have_the_gradients_of_full_logits(precision):
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    generator = torch.Generator().manual_seed(0)
    x, head, other = (torch.randn(n, 16, generator=generator).to(dtype) for n in (40, 30, 30))
    targets = torch.randint(30, (40,), generator=generator)
    weights = torch.rand(40, generator=generator)
    for tensor in (x, head):
        tensor.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        logits, theirs = (F.linear(x, h).float() for h in (head, other))
        pairs = [
            (
                token_cross_entropies(x, targets, head, slice_size=16),
                F.cross_entropy(logits, targets, reduction="none"),
            ),
            (
                token_divergences(x.detach(), x, other, head, slice_size=16),
                F.kl_div(
                    logits.log_softmax(-1), theirs.detach().log_softmax(-1), reduction="none", log_target=True
                ).sum(1),
            ),
        ]
    for found, expected in pairs:
        assert found.dtype == torch.float32
        assert_close(found, expected, 1e-5)
        assert_same_gradients(found, expected, (x, head), weights, 2e-2)  # products are rounded to eight bits


class Largest(TorchDispatchMode):
    """Notices the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def test_no_more_logits_than_a_slice_are_made_and_none_are_kept():
    tokens, width, vocabulary = 64, 4, 1000
    x, y, head = torch.randn(tokens, width), torch.randn(tokens, width, requires_grad=True), torch.randn(1000, width)
    kept = []
    counted = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t)
    with counted, Largest() as largest:
        token_divergences(x, y, head, head, slice_size=8).sum().backward()
    assert largest.elements == 8 * vocabulary
    assert sum(kept) < 8 * vocabulary


@pytest.mark.parametrize("transition", ["rotation", "rotation_real"])
@pytest.mark.parametrize("start", ["teacher", "fresh"])
def test_phase_a_moves_what_it_should_and_nothing_else(start, transition):
    teacher, student = pair(start=start, transition=transition)
    mask = phase_a_mask(student, LAYERS)
    freeze(student, mask)
    phase_a_losses(teacher, student, {"input_ids": some_ids(4, 12)}).losses.sum().backward()
    moved = {name for name, p in student.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert moved == set(mask)
    assert all(p.grad is None for p in teacher.parameters())
    assert not mixer(teacher, 1)._forward_hooks
    assert not mixer(student, 1)._forward_hooks


def test_layers_of_phase_a_do_not_see_each_other():
    teacher, student = pair()
    losses = phase_a_losses(teacher, student, {"input_ids": some_ids(2, 8)}).losses
    for n, other in ((0, 3), (1, 1)):
        found = torch.autograd.grad(
            losses[n].sum(), list(mixer(student, other).parameters()), allow_unused=True, retain_graph=True
        )
        assert all(g is None or not g.any() for g in found)


@pytest.mark.parametrize("matched", ["tokens", "layer_inputs"])
def test_phase_b_moves_what_it_should_and_nothing_else(matched):
    teacher, student = pair()
    mask = phase_b_mask(student, LAYERS)
    freeze(student, mask)
    phase_b_loss(teacher, student, {"input_ids": some_ids(4, 12)}, WEIGHTS, matched=matched).losses.mean().backward()
    moved = {name for name, p in student.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert moved == set(mask)
    assert all(p.grad is None for p in teacher.parameters())


def test_the_control_moves_what_it_should_and_nothing_else():
    model = teacher_of()
    mask = phase_b_mask(model, LAYERS)
    freeze(model, mask)
    next_token_losses(model, {"input_ids": some_ids(4, 12)}).mean().backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert moved == set(mask)


def test_gradient_checkpointing_changes_nothing():
    teacher, student = pair()
    found = []
    for saving in (False, True):
        student.train().zero_grad()
        if saving:
            student.gradient_checkpointing_enable()
        phase_b_loss(teacher, student, {"input_ids": some_ids(2, 8)}, WEIGHTS).losses.mean().backward()
        found.append({name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        assert_close(found[1][name], gradient, 1e-10, name)


def test_reentrant_checkpointing_would_hide_the_layers_and_is_refused():
    teacher, student = pair()
    student.train().gradient_checkpointing_enable({"use_reentrant": True})
    batch = {"input_ids": some_ids(2, 8)}
    with pytest.raises(ValueError, match="student: expected outputs of layer 1 with gradients, got none"):
        phase_b_loss(teacher, student, batch, WEIGHTS)
    assert phase_b_loss(teacher, student, batch, WEIGHTS, matched="layer_inputs").nmse.requires_grad


def test_half_precision_is_for_the_maps_only():
    teacher = teacher_of(dtype=torch.float32)
    student = retrofit(teacher, LAYERS)
    batch = {"input_ids": some_ids(2, 8)}

    def losses():
        first, second = phase_a_losses(teacher, student, batch), phase_b_loss(teacher, student, batch, WEIGHTS)
        return torch.cat(
            [x.flatten() for x in (first.losses, second.nmse, second.kl, next_token_losses(teacher, batch))]
        )

    expected = losses()
    with torch.autocast("cpu", torch.bfloat16):
        found = losses()
        phase_b_loss(teacher, student, batch, WEIGHTS).losses.mean().backward()
    assert found.dtype == torch.float32
    assert_close(found, expected, 0.1)
    assert not torch.equal(found, expected)
    assert all(p.grad is None or p.grad.isfinite().all() for p in student.parameters())


def test_a_few_steps_of_each_phase_help():
    teacher, student = pair(start="fresh")
    batch = {"input_ids": some_ids(4, 12)}
    phases = (
        (phase_a_mask(student, LAYERS), lambda: phase_a_losses(teacher, student, batch).losses.mean(), 0.5),
        (phase_b_mask(student, LAYERS), lambda: phase_b_loss(teacher, student, batch, WEIGHTS).losses.mean(), 0.8),
    )
    for mask, loss_of, share in phases:
        freeze(student, mask)
        named = dict(student.named_parameters())
        groups = [{"params": [named[name]], "lr": 3e-2 * multiplier} for name, multiplier in mask.items()]
        optimiser = torch.optim.Adam(groups)
        losses = []
        for _ in range(12):
            optimiser.zero_grad()
            loss = loss_of()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        assert losses[-1] < share * losses[0], losses


def test_what_is_recorded_and_when():
    teacher = teacher_of()
    ids = some_ids(2, 8)
    with recorded(teacher, [2]) as found:
        teacher(ids)
    assert list(found) == [2]
    assert_close(found[2].x, inputs_of(teacher, ids)[2], 1e-12)
    assert_close(found[2].y, mixer(teacher, 2)(found[2].x)[0], 1e-12)
    before = found[2]
    teacher(some_ids(1, 3))
    assert found[2] is before


def test_bad_batches_are_refused():
    teacher, student = pair()
    with pytest.raises(ValueError, match="batch: expected input_ids, got nothing"):
        phase_a_losses(teacher, student, {})
    ids = some_ids(2, 8)
    with pytest.raises(ValueError, match="batch: expected input_ids, attention_mask, cu_seqlens alone, got 'labels'"):
        phase_b_loss(teacher, student, {"input_ids": ids, "labels": ids}, WEIGHTS)
    with pytest.raises(ValueError, match="batch: expected at least one token to predict, got none"):
        next_token_losses(teacher, {"input_ids": ids[:, :1]})
    with pytest.raises(ValueError, match="slice_size: expected a whole number of at least 1, got 0"):
        next_token_losses(teacher, {"input_ids": ids}, slice_size=0)
