"""Signals during training: the step under way is finished and saved, and then the program stops as it would have."""

import signal
import threading
from dataclasses import replace

import pytest
import torch

from membydesign.training import checkpoint, train
from training.problem import SETTINGS, batch_of, losses_of, model

RARELY = replace(SETTINGS, save_every=1000)


def signals_at(step: int, *numbers: int):
    """Batches that send this process signals before a step begins."""

    def batches(now: int):
        for number in numbers if now == step else ():
            signal.raise_signal(number)
        return batch_of(now)

    return batches


def saved(folder) -> list[str]:
    return [path.name for path in checkpoint.complete_checkpoints(folder)]


@pytest.mark.parametrize("step", [0, 13, 38])
def test_an_interrupt_saves_the_step_and_the_run_goes_on_to_the_same_bits(tmp_path, step):
    whole, stopped, again = (model(dropout=0.2) for _ in range(3))
    expected = train(whole, batch_of, losses_of, RARELY, seed=3)
    with pytest.raises(KeyboardInterrupt):
        train(stopped, signals_at(step, signal.SIGINT), losses_of, RARELY, seed=3, directory=tmp_path)
    assert saved(tmp_path) == [f"step-{step + 1:08d}"]
    done = train(again, batch_of, losses_of, RARELY, seed=3, directory=tmp_path)
    assert (done.step, done.loss) == (expected.step, expected.loss)
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), again.parameters(), strict=True))


def test_a_second_interrupt_does_not_wait(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(model(), signals_at(5, signal.SIGINT, signal.SIGINT), losses_of, RARELY, seed=0, directory=tmp_path)
    assert saved(tmp_path) == []


def test_without_a_directory_an_interrupt_does_not_wait():
    taken = []
    with pytest.raises(KeyboardInterrupt):
        train(model(), signals_at(5, signal.SIGINT), losses_of, RARELY, seed=0, watch=lambda p: taken.append(p.step))
    assert taken == [1, 2, 3, 4, 5]


class Terminated(Exception):
    pass


@pytest.mark.parametrize("times", [1, 2])
def test_a_handler_of_sigterm_sees_it_after_the_checkpoint(tmp_path, times):
    """However often it is sent."""

    def handler(*_):
        assert saved(tmp_path) == ["step-00000006"]
        raise Terminated

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(Terminated):
            train(model(), signals_at(5, *[signal.SIGTERM] * times), losses_of, RARELY, seed=0, directory=tmp_path)
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("handler", [lambda *_: None, signal.SIG_IGN])
def test_a_handler_that_returns_lets_training_go_on(tmp_path, handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        train(model(), signals_at(5, signal.SIGINT), losses_of, RARELY, seed=0, directory=tmp_path)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert saved(tmp_path)[-1] == "step-00000040"


def test_in_another_thread_training_works_and_signals_are_left_alone(tmp_path):
    before, ends = signal.getsignal(signal.SIGINT), []

    def run():
        ends.append(train(model(), batch_of, losses_of, RARELY, seed=0, directory=tmp_path).step)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert ends == [40]
    assert signal.getsignal(signal.SIGINT) is before
