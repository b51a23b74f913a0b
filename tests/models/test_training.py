"""Losses and gradients: labels, packing, checkpointing, and the Trainer."""

import importlib.util
import logging

import pytest
import torch
import torch.nn.functional as F
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from membydesign.models import modeling
from membydesign.testing import assert_close
from models.family import FAMILY, VOCABULARY, cases, fresh_model, model_of, padded_batch, some_ids

IDS = some_ids(2, 13)


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found, wanted, tolerance=1e-4):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_close(found[name], value, tolerance, name)


def total_loss(model, rows) -> torch.Tensor:
    """The sum over the targets of rows that are run by themselves."""
    return torch.stack([model(r[None], labels=r[None]).loss * (len(r) - 1) for r in rows if len(r) > 1]).sum()


def test_the_loss_is_the_cross_entropy_of_the_next_token():
    model = model_of("bayesian_layer")
    labels = IDS.clone()
    labels[0, :5] = -100
    labels[1, -2:] = -100
    out = model(IDS, labels=labels)
    wanted = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    assert_close(out.loss, wanted, 1e-6)
    counted = (labels[:, 1:] != -100).sum()
    assert_close(model(IDS, labels=labels, num_items_in_batch=2 * counted).loss, wanted / 2, 1e-6)


def test_the_loss_of_a_padded_batch_is_that_of_its_sequences():
    model, rows = model_of("bayesian_layer"), [some_ids(9), some_ids(4, seed=2)]
    alone = total_loss(model, rows) / 11
    for side in ("left", "right"):
        ids, mask = padded_batch(rows, side)
        labels = ids.masked_fill(mask == 0, -100)
        if side == "left":  # nothing precedes the first token of the short row
            labels[1, -4] = -100
        assert_close(model(ids, mask, labels=labels).loss, alone, 1e-5)


@cases()
def test_the_loss_of_a_packed_row_is_that_of_its_documents(case):
    """No target crosses into another document; gradients are the same too."""
    rows = [some_ids(n, seed=n) for n in (9, 1, 5, 14)]
    bounds = torch.tensor([0, 9, 10, 15, 29])
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    model = fresh_model(FAMILY[case]).double().train()  # float32 costs some gradients more digits than are compared
    targets = sum(len(row) - 1 for row in rows)
    wanted = total_loss(model, rows) / targets
    wanted.backward()
    expected = gradients(model)
    packed = torch.cat(rows)[None]
    for way in ({"cu_seqlens": bounds}, {"cu_seq_lens_q": bounds.int()}, {"position_ids": positions}):
        model.zero_grad()
        loss = model(packed, labels=packed, **way).loss
        assert_close(loss, wanted, 1e-5)
        loss.backward()
        assert_same_gradients(gradients(model), expected)


def test_the_collator_of_transformers_packs():
    rows = [some_ids(n, seed=n) for n in (5, 3, 8)]
    batch = DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": row.tolist()} for row in rows])
    model = model_of("bayesian_layer")
    assert_close(model(**batch).loss, total_loss(model, rows) / 13, 1e-5)


@cases()
def test_gradients_reach_every_parameter(case):
    model = fresh_model(FAMILY[case], tie_word_embeddings=False).train()
    model(IDS, labels=IDS).loss.backward()
    still = [name for name, p in model.named_parameters() if p.grad is None or not bool(p.grad.abs().max() > 0)]
    assert not still


@cases()
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_nothing(case, reentrant):
    model = fresh_model(FAMILY[case], mlp_dropout=0.1).train()
    ids, mask = padded_batch([some_ids(12), some_ids(7, seed=2)])
    losses, found = [], []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            assert model.is_gradient_checkpointing
        model.zero_grad()
        torch.manual_seed(5)
        loss = model(ids, mask, labels=ids.masked_fill(mask == 0, -100)).loss
        loss.backward()
        losses.append(loss.detach())
        found.append(gradients(model))
    assert torch.equal(losses[0], losses[1])
    assert_same_gradients(found[1], found[0], 1e-6)


def test_checkpointing_keeps_the_gradients_of_evidence():
    model = fresh_model().train()
    found = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        torch.stack(model(IDS, return_evidence=True).log_evidences).sum().backward()
        found.append(gradients(model))
    assert_same_gradients(found[1], found[0], 1e-6)


def test_checkpointing_makes_no_cache_and_says_so(caplog, monkeypatch):
    model = fresh_model().train()
    model.gradient_checkpointing_enable()
    monkeypatch.setattr(modeling.logger, "warning_once", modeling.logger.warning)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level("WARNING"):
        assert model(IDS, use_cache=True).past_key_values is None
    assert "`use_cache=True` is incompatible with gradient checkpointing" in caplog.text
    assert model.eval()(IDS, use_cache=True).past_key_values is not None


def test_training_makes_no_cache_unless_asked():
    model = fresh_model().train()
    assert model(IDS).past_key_values is None
    assert model(IDS, use_cache=True).past_key_values is not None
    assert fresh_model(use_cache=False)(IDS).past_key_values is None


def test_a_cache_carries_gradients():
    """Backpropagation through time over two calls is that of one."""
    model = fresh_model().train()
    weight = torch.randn(2, 13, VOCABULARY, generator=torch.Generator().manual_seed(0))
    (model(IDS).logits * weight).sum().backward()
    wanted = gradients(model)
    model.zero_grad()
    first = model(IDS[:, :8], use_cache=True)
    second = model(IDS[:, 8:], past_key_values=first.past_key_values)
    (torch.cat((first.logits, second.logits), 1) * weight).sum().backward()
    assert_same_gradients(gradients(model), wanted, 1e-3)


def test_a_model_learns():
    model = fresh_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(30):
        loss = model(IDS, labels=IDS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="the Trainer needs accelerate")
@pytest.mark.filterwarnings("ignore")
def test_the_trainer_trains(tmp_path):
    model = fresh_model()
    rows = [{"input_ids": row, "labels": row} for row in some_ids(4, 12).repeat(8, 1)]
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=20,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        gradient_checkpointing=True,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows)  # pyright: ignore[reportArgumentType]
    before = model.eval()(some_ids(4, 12), labels=some_ids(4, 12)).loss
    trainer.train()
    assert model.eval()(some_ids(4, 12), labels=some_ids(4, 12)).loss < 0.5 * before


def test_some_logits_of_a_packed_row_have_the_targets_of_their_own_documents():
    model, ids, bounds = model_of("bayesian_layer"), some_ids(1, 10), torch.tensor([0, 7, 10])
    labels = ids[:, 5:].clone()
    out = model(ids, labels=labels, cu_seqlens=bounds, logits_to_keep=5)
    labels[:, 2] = -100  # position 7 begins a document
    assert_close(out.loss, F.cross_entropy(out.logits[0, :-1], labels[0, 1:], ignore_index=-100), 1e-6)


def test_a_mask_that_masks_nothing_changes_nothing():
    model, ids = model_of("bayesian_layer"), some_ids(1, 10)
    packed = {"position_ids": torch.tensor([[*range(6), *range(4)]]), "labels": ids}
    bare, masked = model(ids, **packed), model(ids, torch.ones_like(ids), **packed)
    assert torch.equal(bare.logits, masked.logits)
    assert torch.equal(bare.loss, masked.loss)
