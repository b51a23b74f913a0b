"""The cases of `same_numbers.py`: every design through every path, decoding steps, layers and language models.

Only names that membydesign keeps public are used, so that one script runs with an old and a new version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor

import membydesign as mbd
from membydesign.layers import LAYERS, make_layer
from membydesign.models import MemoryConfig, MemoryForCausalLM

if TYPE_CHECKING:
    from collections.abc import Iterator

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
SMALL, MIDDLE, LARGE = (2, 37, 2, 8, 8), (1, 70, 1, 32, 16), (1, 130, 2, 64, 64)
"""B, T, H, D, M. Native code filters token by token up to D = 32, and chunk by chunk beyond."""
SETTINGS = [
    *((SMALL, dtype, mode) for dtype in DTYPES for mode in ("plain", "packed", "resumed", "packed resumed")),
    *((MIDDLE, dtype, "resumed") for dtype in ("float32", "float64")),
    *((LARGE, dtype, mode) for dtype in ("float32", "float64") for mode in ("plain", "packed resumed")),
]
RANGES = {"log_decay": (-0.5, 0.0), "angle": (-3.1, 3.1)}
HYBRIDS = [["bayesian_layer", "attention", "rwkv7"], ["bayesian_layer_rotating", "gated_deltanet", "mamba2", "hyena"]]


def linear_rows() -> dict[str, mbd.DesignModel]:
    """The rows of the catalogue that version 46a10ed had."""
    return {
        name: design
        for name, design in mbd.catalogue.items()
        if isinstance(design, mbd.DesignModel) and name not in ("robust_writes", "block_diagonal", "low_rank")
    }


def filter_cases() -> Iterator[tuple[Any, ...]]:
    """List each design through every path, each catalogue row by the default path, and decoding steps."""
    native = native_backend()
    chunks = {"loop": {"method": "recurrent"}, "torch": {"backend": "torch"}, "native": {"backend": native}}
    for name, design in designs().items():
        for sizes, dtype, mode in SETTINGS:
            for path, options in chunks.items():
                yield (
                    f"filter/{name}/{path}/D={sizes[3]} {dtype} {mode}",
                    run_filter,
                    design,
                    sizes,
                    dtype,
                    mode,
                    options,
                )
        for dtype in ("float32", "float64"):
            options = {"backend": native, "chunk_size": 16}
            yield f"filter/{name}/native chunk 16/{dtype}", run_filter, design, MIDDLE, dtype, "resumed", options
        for sizes, dtype in ((sizes, dtype) for sizes in (SMALL, LARGE) for dtype in DTYPES):
            yield f"step/{name}/native/D={sizes[3]} {dtype}", run_steps, design, sizes, dtype, False
            yield f"step/{name}/autograd/D={sizes[3]} {dtype}", run_steps, design, sizes, dtype, True
    for name, design in linear_rows().items():
        for setting, options in {"float32": {}, "state in float64": {"state_dtype": torch.float64}}.items():
            yield f"catalogue/{name}/default/{setting}", run_filter, design, MIDDLE, "float32", "resumed", options


def layer_cases() -> Iterator[tuple[Any, ...]]:
    """List every layer by name, RWKV-7 also at a larger size, and language models of each layer and of hybrids."""
    for name in LAYERS:
        for sizes in ((32, 2, 16, 70), (64, 1, 64, 130))[: 2 if name == "rwkv7" else 1]:
            for dtype in DTYPES:
                yield f"layer/{name}/default/D={sizes[2]} {dtype}", run_layer, name, sizes, dtype
    for layers in (*([name] for name in LAYERS), *HYBRIDS):
        yield f"model/{'+'.join(layers)}/default/float32", run_model, layers


def designs() -> dict[str, Any]:
    """Name every distinct combination of a catalogue row, a transition and one or two noise groups."""
    rows = {**linear_rows(), "latent_input_dense": mbd.DesignModel(mbd.Identity(), mbd.LatentInput(), mbd.Dense())}
    transitions = {kind.__name__: kind() for kind in (mbd.Identity, mbd.ScalarDecay, mbd.DiagonalDecay)}
    transitions |= {f"DampedRotation {noise}": mbd.DampedRotation(noise=noise) for noise in ("all", "real")}
    distinct: dict[str, Any] = {}
    for row, design in rows.items():
        writes = [design.write] + [mbd.ObserveMemory(groups=2)] * isinstance(design.write, mbd.ObserveMemory)
        for (name, transition), write in ((item, write) for item in transitions.items() for write in writes):
            try:
                changed = design.replace(transition=transition, write=write)
            except ValueError:  # a combination without meaning
                continue
            if changed not in distinct.values():
                distinct[f"{row} {name} G={write.groups}"] = changed
    return distinct


def native_backend() -> str:
    """Return the name of the backend that runs native code, which older versions call "cpu"."""
    q = torch.ones(1, 1, 1, 2)
    try:
        mbd.filter_sequence(mbd.catalogue["deltanet"], q, q, q, write_noise=1.0, prior_variance=1.0, backend="native")
    except ValueError:
        return "cpu"
    return "native"


def problem(
    generator: Generator, design: Any, sizes: tuple[int, ...], dtype: str, beliefs: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Draw q, k, v and step parameters, and mean and covariance of beliefs to start from."""
    (B, T, H, D, M), G = sizes, design.write.groups
    narrow, wide = DTYPES[dtype], torch.promote_types(DTYPES[dtype], torch.float32)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    decays = {mbd.DiagonalDecay: (D,), mbd.DampedRotation: (D // 2,)}
    axes = {"log_decay": decays.get(type(design.transition), ()), "angle": (D // 2,)}
    axes["write_noise"] = (G,) if G > 1 else ()
    axes["prior_variance"] = (M,) if isinstance(design.covariance, mbd.PerColumnReset) else ()
    inputs = {"q": normal(B, T, H, D), "k": normal(B, T, H, D) / D**0.5, "v": normal(B, T, H, M)}
    inputs = {name: x.to(narrow) for name, x in inputs.items()}
    for name in sorted(parameter.name for parameter in design.step_parameters):
        low, high = RANGES.get(name, (-3.0, 0.7))
        x = low + (high - low) * torch.rand(B, T, H, *axes.get(name, ()), generator=generator, dtype=torch.float64)
        inputs[name] = (x if name in RANGES else x.exp()).to(wide)
    initial = {"mean": normal(beliefs, H, D, M)}
    if isinstance(design.covariance, mbd.Diagonal):
        initial["covariance"] = 0.1 + normal(beliefs, H, G, D).square()
    elif isinstance(design.covariance, mbd.Dense):
        root = normal(beliefs, H, G, D, D)
        initial["covariance"] = root @ root.mT / D + 0.1 * torch.eye(D)
        initial["covariance"] = (initial["covariance"] + initial["covariance"].mT) / 2
    return inputs, {name: x.to(wide) for name, x in initial.items()}


def gradients(results: dict[str, Any], leaves: dict[str, Tensor], generator: Generator) -> dict[str, Tensor]:
    """Differentiate a random linear function of the results; zero for a leaf that they do not depend on."""
    terms = [
        (x * torch.randn(x.shape, generator=generator).to(x.dtype)).sum() for x in results.values() if x is not None
    ]
    found = torch.autograd.grad(sum(term.double() for term in terms), list(leaves.values()), materialize_grads=True)
    return {f"gradient of {name}": x for name, x in zip(leaves, found, strict=True)}


def run_filter(
    generator: Generator, design: Any, sizes: tuple[int, ...], dtype: str, mode: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Filter one sequence batch: output, belief, variance, evidence and all gradients."""
    B, T = sizes[0], sizes[1]
    if "packed" in mode:
        B, options = 1, {**options, "cu_seqlens": torch.tensor([0, 11, 11, T])}
    inputs, initial = problem(generator, design, (B, *sizes[1:]), dtype, 3 if "packed" in mode else B)
    leaves = inputs | ({f"initial {name}": x for name, x in initial.items()} if "resumed" in mode else {})
    for x in leaves.values():
        x.requires_grad_()
    options = {**options, "initial": mbd.Belief(**initial) if "resumed" in mode else None, "return_evidence": True}
    has_variance = not isinstance(design.covariance, mbd.MeanOnly)
    out = mbd.filter_sequence(design, **inputs, **options, return_variance=has_variance)
    results = {"output": out.output, "mean": out.belief.mean, "covariance": getattr(out.belief, "covariance", None)}
    results |= {name: getattr(out, name) for name in ("variance", "log_evidence", "write_log_evidence")}
    return results | gradients(results, leaves, generator)


def run_steps(generator: Generator, design: Any, sizes: tuple[int, ...], dtype: str, gradient: bool) -> dict[str, Any]:
    """Take four decoding steps from a random belief; native code runs those without a gradient."""
    inputs, initial = problem(generator, design, (sizes[0], 4, *sizes[2:]), dtype, sizes[0])
    leaves = inputs | {f"initial {name}": x for name, x in initial.items()}
    for x in leaves.values():
        x.requires_grad_(gradient)
    belief, results = mbd.Belief(**initial), {}
    for t in range(4):
        step = {name: x[:, t] for name, x in inputs.items()}
        results[f"output {t}"], belief = mbd.filter_step(design, belief, **step)
    results |= {"mean": belief.mean, "covariance": getattr(belief, "covariance", None)}
    return results | (gradients(results, leaves, generator) if gradient else {})


def start_and_move(module: Any, generator: Generator, size: float) -> dict[str, Tensor]:
    """Return the starting weights, then move each, since many start at zero or alike."""
    start = {f"start {key}": x.clone() for key, x in module.state_dict().items()}
    with torch.no_grad():
        for _, parameter in sorted(module.eval().named_parameters()):
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return start


def parts(belief: Any, name: str) -> dict[str, Tensor]:
    """Number the tensors of a layer's belief; what follows the colon may differ between versions."""
    named = sorted(belief.parts(), key=lambda part: part[0])
    return {f"{name} {i}:{part}": x.flatten() for i, (part, x) in enumerate(named)}


def run_layer(generator: Generator, name: str, sizes: tuple[int, ...], dtype: str) -> dict[str, Any]:
    """Run one layer over whole, packed and split sequences and step by step, with gradients of the whole."""
    hidden, heads, head_dim, T = sizes
    torch.manual_seed(0)
    layer = make_layer(name, hidden, num_heads=heads, head_dim=head_dim)
    results = start_and_move(layer, generator, 0.02 if name == "hyena" else 0.1)
    layer.to(DTYPES[dtype])
    x = torch.randn(2, T, hidden, generator=generator).to(DTYPES[dtype]).requires_grad_()
    y, belief = layer(x)
    results |= {"output": y, **parts(belief, "belief")}
    results |= gradients({"y": y}, {"x": x, **dict(sorted(layer.named_parameters()))}, generator)
    with torch.no_grad():
        results["output packed"], belief = layer(x[:1], cu_seqlens=torch.tensor([0, 9, 9, T]))
        results |= parts(belief, "belief packed")
        belief = None
        for start, end in [(0, 40), (40, T - 8), *((t, t + 1) for t in range(T - 8, T))]:
            results[f"output from {start}"], belief = layer(x[:, start:end], belief)
    return results | parts(belief, "belief after steps")


def run_model(generator: Generator, layers: list[str]) -> dict[str, Any]:
    """Run one language model: logits, gradients of the loss, padding, decoding with the cache, greedy generation."""
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48}
    torch.manual_seed(0)
    model = MemoryForCausalLM(MemoryConfig(layers=layers, tie_word_embeddings=False, pad_token_id=0, **sizes))
    results = start_and_move(model, generator, 0.02 if "hyena" in layers else 0.1)
    ids = torch.randint(1, 61, (2, 70), generator=generator)
    mask = (torch.arange(70) >= torch.tensor([[13], [0]])).long()
    out = model(ids, labels=ids)
    results |= {"logits": out.logits, "loss": out.loss}
    results |= gradients({"loss": out.loss}, dict(sorted(model.named_parameters())), generator)
    with torch.no_grad():
        results["logits padded"] = model(ids, mask).logits
        cache = model(ids[:, :60]).past_key_values
        for t in range(60, 70):
            results[f"logits of step {t}"] = model(ids[:, t : t + 1], past_key_values=cache).logits
        for i, layer in enumerate(cache.layers):
            results |= parts(layer.belief, f"belief of block {i}")
        results["tokens"] = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    return results
