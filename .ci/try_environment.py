"""Import the library, filter with every design of the catalogue and train a step of a model: all on the CPU.

Arguments: the packages that must be there, of triton and fla. With MEMBYDESIGN_NATIVE=0 everything goes through torch.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import membydesign as mbd
from membydesign.filter.native import structs

if TYPE_CHECKING:
    from collections.abc import Callable

NUMBERS = {"log_decay": -0.1, "process_noise": 0.1, "write_noise": 0.2, "prior_variance": 1.0, "angle": 0.3}


def main() -> None:
    """Say in a few lines what was found; an assertion fails otherwise."""
    assert not torch.cuda.is_available()
    expected, native = set(sys.argv[1:]), os.environ.get("MEMBYDESIGN_NATIVE") != "0"
    present = {name for name in ("triton", "fla") if importlib.util.find_spec(name)}
    assert present == expected, f"expected {expected}, got {present}"
    calls = count_native_calls()

    torch.manual_seed(0)
    x = torch.randn(3, 2, 70, 2, 16)
    for name, design in mbd.catalogue.items():
        for dtype in (torch.float32, torch.bfloat16):
            q, k, v = x.to(dtype).unbind()
            step = {parameter.name: NUMBERS[parameter.name] for parameter in design.step_parameters}
            before = len(calls)
            out = mbd.filter_sequence(design, q, k, v, **step)
            assert (len(calls) > before) == native, f"{name} in {dtype}: native code ran {len(calls) - before} times"
            named = mbd.filter_sequence(design, q, k, v, **step, backend="native" if native else "torch")
            assert torch.equal(out.output, named.output), name
            loop = mbd.filter_sequence(design, q, k, v, **step, method="recurrent")
            torch.testing.assert_close(out.belief.mean, loop.belief.mean, rtol=1e-4, atol=1e-4)
            said = refusal(partial(mbd.filter_sequence, design, q, k, v, **step, backend="fla"))
            assert "for tensors on cpu" in said, said
    assert "fla" not in sys.modules, "imported where it cannot run"
    print(f"{len(mbd.catalogue)} designs filtered by {'native code' if native else 'torch'}; {loss_line()}")


def refusal(run: Callable[[], object]) -> str:
    """Why a call was refused; empty if it was not."""
    try:
        run()
    except ValueError as error:
        return str(error)
    return ""


def count_native_calls() -> list[str]:
    """A list that grows with every call of native code."""
    calls, call = [], structs.Function.__call__

    def counted(function: structs.Function, heads: int, *values: Any) -> None:
        calls.append(function.call.__name__)
        call(function, heads, *values)

    structs.Function.__call__ = counted
    return calls


def loss_line() -> str:
    """A few training steps of a small language model."""
    from membydesign.models import MemoryConfig, MemoryForCausalLM

    config = MemoryConfig(vocab_size=64, hidden_size=32, layers=["bayesian_layer", "kda"], num_heads=2, head_dim=16)
    model = MemoryForCausalLM(config)
    optimiser = torch.optim.AdamW(model.parameters(), 1e-2)
    tokens = torch.randint(64, (2, 40), generator=torch.Generator().manual_seed(1))
    losses, start = [], time.perf_counter()
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    return f"a model trains, loss {losses[0]:.3f} → {losses[-1]:.3f} in {time.perf_counter() - start:.1f} s"


if __name__ == "__main__":
    main()
