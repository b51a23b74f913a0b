"""Time and memory of Transformers models with this library's kernels under their layers, compared with their own.

Models have about 100M parameters at the default size, and are built from their own configurations. Everything is CPU
time of one process, since what is compared runs in turn on a machine that others may use too.

The share of the kernels is what the recurrence and the short convolution take of a whole training step. They are timed
by themselves, forward and backward, on the arguments that a layer of the model passes to them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from membydesign_bench import child
from membydesign_bench.memory import rise
from membydesign_bench.problem import Size
from membydesign_bench.timing import Job, Row, Settings, interleaved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECTION = "accelerate"
SIZE = Size(1, 6, 2048, 128)
"""Heads of the recurrent layers, and tokens of prefill; training steps have a quarter of the tokens."""
KIMI_SHARE = 8
"""Training steps of Kimi Linear have an eighth, since Transformers' own KDA keeps [T,64,D] numbers for each head."""
DECODED = 16
VOCABULARY = 32_000
BLOCKS = 12
MODELS = {
    "qwen3_next": "Qwen3-Next",
    "qwen3_5": "Qwen3.5",
    "olmo_hybrid": "OLMo-Hybrid",
    "kimi_linear": "Kimi Linear",
    "mamba2": "Mamba-2",
}
OURS, THEIRS = "accelerated", "as it is"


def accelerated(settings: Settings) -> Iterator[Job]:
    """All models at each size."""
    if find_spec("transformers") is None:
        return
    for size in settings.sizes or (SIZE,):
        for family, name in MODELS.items():
            yield Job(f"{name}: training, prefill and decoding", partial(_times, family, size, settings.rounds))
            yield Job(f"{name}: memory of training", partial(_memory, family, size))


def build(family: str, size: Size) -> Any:
    """A model with untrained weights: H·D wide, three recurrent layers of four, and SwiGLU of 8/3 of the width."""
    import transformers

    H, D, width = size.H, size.D, size.H * size.D
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "num_hidden_layers": BLOCKS,
        "tie_word_embeddings": True,
        **{f"{name}_token_id": None for name in ("bos", "eos", "pad")},
    }
    hybrid: dict[str, Any] = {
        **common,
        "intermediate_size": 8 * width // 3 // 16 * 16,
        "num_attention_heads": H,
        "num_key_value_heads": H,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * (BLOCKS // 4),
    }
    heads: dict[str, Any] = {
        "linear_num_key_heads": H,
        "linear_num_value_heads": H,
        "linear_key_head_dim": D,
        "linear_value_head_dim": D,
    }
    torch.manual_seed(0)
    if family == "qwen3_next":
        config = transformers.Qwen3NextConfig(**hybrid, **heads, head_dim=D, num_experts=0)
        return transformers.Qwen3NextForCausalLM(config)
    if family == "qwen3_5":
        return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**hybrid, **heads, head_dim=D))
    if family == "olmo_hybrid":
        return transformers.OlmoHybridForCausalLM(transformers.OlmoHybridConfig(**hybrid, **heads))
    if family == "kimi_linear":
        ranks = {"kv_lora_rank": width // 4, "qk_rope_head_dim": D // 2, "qk_nope_head_dim": D // 2, "v_head_dim": D}
        more = {"linear_num_heads": H, "linear_head_dim": D, "mlp_layer_types": ["dense"] * BLOCKS}
        return transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**hybrid, **ranks, **more))
    half = D // 2
    sizes: dict[str, Any] = {"num_heads": 4 * H, "head_dim": half, "state_size": D, "n_groups": 1}
    return transformers.Mamba2ForCausalLM(
        transformers.Mamba2Config(**{**common, "num_hidden_layers": 2 * BLOCKS}, **sizes)
    )


def trained_tokens(family: str, size: Size) -> Tensor:
    """The tokens of a training step."""
    return _tokens(size.B, max(1, size.T // (KIMI_SHARE if family == "kimi_linear" else 4)))


def _tokens(*shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(0))


def _training_step(model: Any, tokens: Tensor) -> None:
    model.zero_grad()
    model(tokens, labels=tokens, use_cache=False).loss.backward()


def _cache(out: Any) -> dict[str, Any]:
    return {name: out[name] for name in ("past_key_values", "cache_params") if name in out}


@torch.no_grad()
def _prefill(model: Any, tokens: Tensor) -> dict[str, Any]:
    return _cache(model(tokens, use_cache=True, logits_to_keep=1))


@torch.no_grad()
def _decode(model: Any, tokens: Tensor) -> None:
    cache = _prefill(model, tokens[:, :1])
    for t in range(1, DECODED + 1):
        cache = _cache(model(tokens[:, t : t + 1], use_cache=True, **cache))


def _both(model: Any, work: Callable[[], object]) -> dict[str, Callable[[], object]]:
    from membydesign.integrations.transformers import accelerate

    def ours() -> None:
        with accelerate(model):
            work()

    return {OURS: ours, THEIRS: work}


def _times(family: str, size: Size, rounds: int) -> list[Row]:
    model, name = build(family, size), MODELS[family]
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    what, trained, tokens = f"{name}, {millions:.0f}M", trained_tokens(family, size), _tokens(size.B, size.T)
    rows, steps = [], {}
    for task, work in (
        (f"training step, {trained.shape[1]} tokens", partial(_training_step, model.train(), trained)),
        (f"prefill, {size.T} tokens", partial(_prefill, model, tokens)),
        (f"decoding, {DECODED} tokens", partial(_decode, model, _tokens(size.B, DECODED + 1))),
    ):
        model.train(task.startswith("training"))
        times = interleaved(_both(model, work), rounds, "cpu time")
        steps[task] = times
        rows.append(Row(SECTION, task, str(size), f"{what}, {OURS}", times[OURS], "ms", THEIRS, times[THEIRS]))
    calls = kernel_calls(model.train(), trained)
    kernels = interleaved(_kernel_works(calls), rounds, "cpu time")
    per_step = {whose: time * _layers(model) for whose, time in kernels.items()}
    task = f"kernels of a training step, {trained.shape[1]} tokens"
    rows.append(Row(SECTION, task, str(size), f"{what}, {OURS}", per_step[OURS], "ms", THEIRS, per_step[THEIRS]))
    whole = next(iter(steps.values()))
    shares = {whose: 100 * per_step[whose] / whole[whose] for whose in (OURS, THEIRS)}
    rows.append(
        Row(
            SECTION,
            "share of the kernels in it",
            str(size),
            f"{what}, {OURS}",
            shares[OURS],
            "%",
            THEIRS,
            shares[THEIRS],
        )
    )
    return rows


def _recurrent(model: Any) -> list[Any]:
    from membydesign.integrations.transformers import accelerate

    with accelerate(model) as acceleration:
        return [model.get_submodule(name) for name in acceleration.layers]


def _layers(model: Any) -> int:
    return len(_recurrent(model))


def kernel_calls(model: Any, tokens: Tensor) -> dict[str, tuple[tuple[Any, ...], dict[str, Any], Callable[..., Any]]]:
    """The arguments that the model's first recurrent layer passes to each function, and Transformers' function."""
    from types import MethodType

    from membydesign.integrations.transformers.acceleration import forward_with, replaced_functions

    layer, calls = _recurrent(model)[0], {}

    def recording(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if result is not None:  # what Transformers has no code for
                calls[name] = args, kwargs, function
            return result

        return record

    functions = {name: recording(name, f) for name, f in replaced_functions(type(layer)).items()}
    layer.forward = MethodType(forward_with(type(layer), functions), layer)
    try:
        with torch.no_grad():
            model(tokens, use_cache=False)
    finally:
        del layer.forward
    return calls


def _kernel_works(calls: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """Forward and backward of all functions, ours and theirs."""
    from membydesign.integrations.transformers.acceleration import REPLACEMENTS

    def leaf(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        # The same strides, since a layer passes transposed projections.
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x).requires_grad_()

    def run(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> None:
        result = function(*args, **kwargs)
        output = result[0] if isinstance(result, tuple) else result
        if output.ndim == 3:  # of the convolution, which layers read with channels last
            output = output.mT.contiguous()
        leaves = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.requires_grad]
        torch.autograd.grad(output, leaves, torch.ones_like(output), allow_unused=True)

    works: dict[str, Callable[[], object]] = {}
    for whose in (OURS, THEIRS):
        parts = []
        for name, (args, kwargs, original) in calls.items():
            function = REPLACEMENTS[name].instead_of(original) if whose == OURS else original
            parts.append(partial(run, function, [*map(leaf, args)], {key: leaf(x) for key, x in kwargs.items()}))
        works[whose] = partial(_all, parts)
    return works


def _all(parts: list[Callable[[], None]]) -> None:
    for part in parts:
        part()


def _memory(family: str, size: Size) -> list[Row]:
    """Peak memory of a training step on top of the model and its gradients."""
    peaks = {whose: _peak(family, size, whose) for whose in (OURS, THEIRS)}
    task = f"memory of a training step, {trained_tokens(family, size).shape[1]} tokens"
    return [Row(SECTION, task, str(size), f"{MODELS[family]}, {OURS}", peaks[OURS], "MiB", THEIRS, peaks[THEIRS])]


def _peak(family: str, size: Size, whose: str) -> float | None:
    command = child.command(__name__, family, size, whose, torch.get_num_threads())
    options = child.options(MALLOC_MMAP_THRESHOLD_="131072")
    result = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if result.returncode:
        reason = result.stderr.strip().splitlines()[-1:] or [f"exit code {result.returncode}"]
        print(f"mbd bench: no memory of {MODELS[family]}, {whose}: {reason[0]}", file=sys.stderr)
        return None
    return json.loads(result.stdout.splitlines()[-1])


def _child(family: str, size: str, whose: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    full = Size.parse(size)
    model = build(family, full).train()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    tokens = trained_tokens(family, full)

    def step(tokens: Tensor) -> None:
        model(tokens, labels=tokens, use_cache=False).loss.backward()

    if whose == OURS:
        from membydesign.integrations.transformers import accelerate

        accelerate(model)
    step(tokens[:1, :16])
    print(json.dumps(rise(partial(step, tokens))))


if __name__ == "__main__":
    _child(*sys.argv[1:])
