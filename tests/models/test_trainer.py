"""Transformers' Trainer on a hybrid: evaluating, and resuming from a checkpoint."""

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainingArguments

from models.family import VOCABULARY, fresh_model, some_ids

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="the Trainer needs accelerate"),
    pytest.mark.filterwarnings("ignore"),
]
HYBRID = ["bayesian_layer", "attention"]
ROWS = [{"input_ids": row, "labels": row} for row in some_ids(6, 12)]


def trainer(folder, model=None, compute_metrics=None, **settings) -> Any:
    settings = {"max_steps": 4, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, **settings}
    settings = {"learning_rate": 1e-2, "report_to": "none", "save_strategy": "no", "logging_steps": 1, **settings}
    arguments = TrainingArguments(str(folder), use_cpu=True, disable_tqdm=True, **settings)
    rows: list = ROWS
    return Trainer(
        fresh_model(HYBRID, mlp_dropout=0.1) if model is None else model,
        arguments,
        train_dataset=rows,  # pyright: ignore[reportArgumentType]
        eval_dataset=rows,  # pyright: ignore[reportArgumentType]
        compute_metrics=compute_metrics,
    )


def loss_of_all_rows(model) -> float:
    ids = torch.stack([row["input_ids"] for row in ROWS])
    with torch.no_grad():
        return model.eval()(ids, labels=ids).loss.item()


@pytest.mark.parametrize("only_loss", [False, True])
def test_evaluate_gives_the_loss(tmp_path, only_loss):
    model = fresh_model(HYBRID)
    found = trainer(tmp_path, model, prediction_loss_only=only_loss).evaluate()
    assert found["eval_loss"] == pytest.approx(loss_of_all_rows(model), abs=1e-5)


def test_metrics_are_of_the_logits_alone(tmp_path):
    """Beliefs are no predictions: they stay out of what is gathered."""
    model, seen = fresh_model(HYBRID), []

    def accuracy(prediction) -> dict[str, float]:
        seen.append(prediction)
        return {"accuracy": float((prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]).mean())}

    found = trainer(tmp_path, model, accuracy).evaluate()
    (prediction,) = seen
    assert isinstance(prediction.predictions, np.ndarray)
    assert prediction.predictions.shape == (6, 12, VOCABULARY)
    ids = torch.stack([row["input_ids"] for row in ROWS])
    with torch.no_grad():
        logits = model(ids).logits
    np.testing.assert_allclose(prediction.predictions, logits.numpy(), atol=1e-4)
    assert found["eval_accuracy"] == pytest.approx(float((logits[:, :-1].argmax(-1) == ids[:, 1:]).float().mean()))
    assert trainer(tmp_path, model).predict(ROWS).predictions.shape == (6, 12, VOCABULARY)


def test_training_evaluates_on_its_way(tmp_path):
    running = trainer(tmp_path, eval_strategy="steps", eval_steps=2)
    running.train()
    losses = [entry["eval_loss"] for entry in running.state.log_history if "eval_loss" in entry]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert losses[1] == pytest.approx(loss_of_all_rows(running.model), abs=1e-5)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    """Weights to the last bit, with dropout; the checkpoint is written while the model also evaluates."""
    whole = trainer(tmp_path / "whole", save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2)
    whole.train()
    wanted = {name: value.clone() for name, value in whole.model.state_dict().items()}
    other = fresh_model(HYBRID, mlp_dropout=0.1)
    with torch.no_grad():
        for parameter in other.parameters():  # nothing of it may survive
            parameter.zero_()
    resumed = trainer(tmp_path / "resumed", other, eval_strategy="steps", eval_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert resumed.state.global_step == 4
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, wanted[name]), name
