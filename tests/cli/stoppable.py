"""`python stoppable.py …` is `mbd …`, where the experiment "recall" trains a small model with several seeds."""

import os
import time
from dataclasses import dataclass

from membydesign.cli import main
from membydesign.reports.record import Outcome
from membydesign.training import Run, TrainSettings, train
from training.problem import batch_of, losses_of, model

TITLE = "A small model"


@dataclass(frozen=True)
class Seed:
    seed: int


@dataclass(frozen=True)
class Seeds:
    seeds: int = 4


PRESETS = {"smoke": Seeds()}

# Checkpoints are further apart than a run is long: what is there was saved because the run was stopped.
SETTINGS = TrainSettings(steps=60, batch_size=8, learning_rate=1e-2, log_every=2, save_every=1000)


def work(config: Seed, directory, watch) -> dict:
    small = model(config.seed, dropout=0.2)
    pause = float(os.environ.get("STEP_SECONDS", "0"))

    def slowly(step: int):
        time.sleep(pause if step >= SETTINGS.log_every else 0)  # once the log shows that the run is under way
        return batch_of(step)

    done = train(small, slowly, losses_of, SETTINGS, seed=config.seed, directory=directory, watch=watch)
    return {"loss": done.loss, "weights": [p.double().sum().item() for p in small.parameters()]}


def runs(seeds: int = Seeds.seeds) -> list[Run]:
    return [Run(f"seed{seed}", Seed(seed), work) for seed in range(seeds)]


def run(config: Seeds, context) -> Outcome:
    return Outcome(config, [], context.sweep(runs(config.seeds)))


def plot(_outcome, _directory) -> dict:
    return {}


if __name__ == "__main__":
    from membydesign import experiments

    experiments.EXPERIMENTS["recall"] = "cli.stoppable"
    main()
