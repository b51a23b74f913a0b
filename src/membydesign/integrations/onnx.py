"""Models and layers as ONNX graphs, for ONNX Runtime (docs/howto/export.md).

`export` writes one graph for prefill and decoding: tokens and the state so far go in, results and the new state come
out, for any batch and any number of tokens. `torch.onnx.export` traces the model itself, so whatever torch computes is
what the graph says; only the filters are replaced, by the operators of `membydesign.filter.onnx`.
"""

from __future__ import annotations

import json
import logging
import warnings
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from membydesign.filter.kernels import onnx_operator
from membydesign.install import install_hint
from membydesign.layers import FilterLayer, LayerBelief, SequenceLayer, SoftmaxAttention
from membydesign.products import full_precision

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from os import PathLike

    from membydesign.models import MemoryForCausalLM

__all__ = ["Exported", "export"]

OPSET = 21
"""Of the standard operators: the one that is tested with ONNX Runtime's `LinearAttention`."""

TOLERANCE = 1e-4
"""The largest difference between graph and model that `export` accepts, relative to the largest output."""


class Exported(NamedTuple):
    """What `export` wrote.

    Attributes:
        path: the file; weights of more than 1.5 GB lie next to it, in `<path>.data`.
        inputs: the names of the inputs: tokens first, then the state.
        outputs: the names of the outputs: results first, then the new state, in the order of the inputs.
        operators: what runs each layer: "LinearAttention", "Scan", or "attention" for its matrix products; the class of
            a layer of your own.
        opset: of the standard operators.
        difference: the largest difference from the model over 7 tokens and 3 decoding steps, relative to the largest
            output; None if ONNX Runtime was not asked.
    """

    path: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    operators: tuple[str, ...]
    opset: int
    difference: float | None


def export(model: MemoryForCausalLM | SequenceLayer, path: str | PathLike[str], *, check: bool = True) -> Exported:
    """Write a model or a layer as an ONNX graph.

    Args:
        model: a `MemoryForCausalLM`, from `input_ids` [B,T] to `logits` [B,T,vocab_size]; or a layer, from `x` to `y`,
            both [B,T,hidden_size]. On the CPU, with float32 weights.
        path: the file to write.
        check: compare the graph with the model in ONNX Runtime.

    The graph computes in float32. Every part of the state is an input `past.*` and an output `present.*` whose first
    axis is the batch. Inputs of the state may be left out: the graph has the beliefs before the first token as
    defaults.

    Raises:
        ValueError: for a model with a layer that ONNX cannot run; names the layer, its design and the reason.
        ModuleNotFoundError: if a package of the extra `onnx` is missing.
        RuntimeError: if PyTorch is too old.
        ArithmeticError: if the graph does not compute what the model does; nothing is left at `path` then.

    Examples:
        >>> layer = make_layer("gated_deltanet", 32, num_heads=2, head_dim=16)  # doctest: +SKIP
        >>> export(layer, "layer.onnx").operators  # doctest: +SKIP
        ('LinearAttention',)
    """
    if not hasattr(torch.onnx, "ops"):
        raise RuntimeError(f"export needs a PyTorch with torch.onnx.ops (2.13 is tested), got {torch.__version__}")
    layers = _layers(model)
    operators = tuple(_operator_of(place, layer) for place, layer in layers.items())
    _refuse_weights(model)
    with _need_onnx("onnx", "onnxscript", "onnx_ir", *(["onnxruntime"] if check else [])), _quiet(), _evaluating(model):
        graph = _Graph(model, [_initial(layer) for layer in layers.values()])
        program = _traced(graph)
        _complete(program.model, graph, dict(zip(layers, operators, strict=True)))
        program.save(path)
        difference = _difference(graph, path) if check else None
    if difference is not None and not difference <= TOLERANCE:
        for file in (Path(path), Path(f"{path}.data")):
            file.unlink(missing_ok=True)
        raise ArithmeticError(
            f"{path}: expected the graph to compute what the model does, within {TOLERANCE:g} of the largest output, "
            f"got a difference of {difference:.2g}"
        )
    return Exported(Path(path), graph.inputs, graph.outputs, operators, OPSET, difference)


class _Graph(nn.Module):
    """A model as a function of tensors: tokens and the parts of beliefs → results and the parts of new beliefs."""

    def __init__(self, model: Any, start: list[LayerBelief]) -> None:
        super().__init__()
        self.model, self.start, self.random = model, start, torch.Generator().manual_seed(0)
        self.of_layer = isinstance(model, SequenceLayer)
        parts = [name if self.of_layer else f"{i}.{name}" for i, b in enumerate(start) for name, _ in b.parts()]
        tokens, result = ("x", "y") if self.of_layer else ("input_ids", "logits")
        self.inputs = (tokens, *(f"past.{name}" for name in parts))
        self.outputs = (result, *(f"present.{name}" for name in parts))

    @property
    def defaults(self) -> list[Tensor]:
        """The parts of the beliefs of one sequence before its first token."""
        return [part.detach() for belief in self.start for _, part in belief.parts()]

    def tokens(self, B: int, T: int) -> Tensor:
        """Random input of the model."""
        if self.of_layer:
            return torch.randn(B, T, self.model.hidden_size, generator=self.random)
        return torch.randint(self.model.config.vocab_size, (B, T), generator=self.random)

    @torch.no_grad()
    def example(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Inputs whose sizes tell every axis apart that may change."""
        beliefs = self(self.tokens(2, 3), tuple(self.defaults))[1:]
        return self.tokens(2, 5), tuple(beliefs)

    def forward(self, tokens: Tensor, past: Sequence[Tensor]) -> list[Tensor]:
        parts = iter([_for_every_row(x, tokens) for x in past])
        beliefs = [belief.map(lambda _: next(parts)) for belief in self.start]
        if self.of_layer:
            y, belief = self.model(tokens, beliefs[0])
            return [y, *(part for _, part in belief.parts())]
        from membydesign.models import MemoryCache

        cache = MemoryCache(len(beliefs))
        cache.advance(beliefs, 0)
        out = self.model(tokens, past_key_values=cache, use_cache=True)
        return [out.logits, *(part for layer in cache.layers if layer.belief for _, part in layer.belief.parts())]


def _for_every_row(past: Tensor, tokens: Tensor) -> Tensor:
    """A part of a belief, of as many sequences as `tokens` has; it may be one of a single sequence."""
    if not torch.compiler.is_compiling():
        return past.expand(len(tokens), *past.shape[1:])
    # As operators of ONNX, since torch would take the two batches for the same number.
    rows = torch.onnx.ops.symbolic("Shape", (tokens,), {"start": 0, "end": 1}, dtype=torch.int64, shape=(1,))
    shape = torch.cat((rows, torch.ones(past.ndim - 1, dtype=torch.int64)))
    return torch.onnx.ops.symbolic("Expand", (past, shape), dtype=past.dtype, shape=(tokens.shape[0], *past.shape[1:]))


def _traced(graph: _Graph) -> Any:
    """Trace a model with torch.onnx.export; batch, time and the growing axes of states stay open."""
    tokens, past = graph.example()
    dynamic = torch.export.Dim.DYNAMIC
    grows = [x.shape[1:2] != default.shape[1:2] for x, default in zip(past, graph.defaults, strict=True)]
    shapes = ({0: dynamic, 1: dynamic}, tuple({0: dynamic, 1: dynamic} if more else {0: dynamic} for more in grows))
    with torch.no_grad(), full_precision("cpu"):
        return torch.onnx.export(
            graph,
            (tokens, past),
            dynamo=True,
            dynamic_shapes=shapes,
            opset_version=OPSET,
            input_names=list(graph.inputs),
            output_names=list(graph.outputs),
            verbose=False,
        )


def _complete(model: Any, graph: _Graph, operators: dict[str, str]) -> None:
    """Give the inputs of the state their defaults, the open axes names, and the file a description of itself."""
    import onnx_ir as ir

    for value in (*model.graph.inputs, *model.graph.outputs):
        tokens = value.name in (graph.inputs[0], graph.outputs[0])
        names = ("batch", "time" if tokens else f"{value.name}.length")
        if value.name in graph.inputs[1:]:
            names = (f"{value.name}.batch", names[1])  # 1, or the batch
        value.shape = ir.Shape(
            [size if isinstance(size, int) else names[axis] for axis, size in enumerate(value.shape)]
        )
    for value, default in zip(model.graph.inputs[1:], graph.defaults, strict=True):
        value.const_value = ir.tensor(default.numpy(), name=value.name)
        model.graph.register_initializer(value)
    for node in model.graph.all_nodes():  # stack traces of the code that was traced, with the paths of its files
        node.metadata_props.clear()
    model.metadata_props["membydesign"] = json.dumps({"layers": operators})


def _difference(graph: _Graph, path: str | PathLike[str]) -> float:
    """The largest difference between file and model over 7 tokens and 3 decoding steps, relative to the outputs."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    fed: dict[str, Any] = {}
    past: Sequence[Tensor] = graph.defaults
    largest = difference = 0.0
    with torch.no_grad():
        for T in (7, 1, 1, 1):
            tokens = graph.tokens(2, T)
            ours = graph(tokens, past)
            theirs = session.run(None, {graph.inputs[0]: tokens.numpy(), **fed})
            fed, past = dict(zip(graph.inputs[1:], theirs[1:], strict=True)), ours[1:]
            largest = max(largest, float(ours[0].abs().max()))
            difference = max(difference, float((torch.from_numpy(theirs[0]) - ours[0]).abs().max()))
    return difference / largest if largest else difference


def _layers(model: Any) -> dict[str, SequenceLayer]:
    """The layers of a model by their place; or a layer itself."""
    if isinstance(model, SequenceLayer):
        return {type(model).__name__: model}
    mixers = getattr(getattr(model, "model", None), "mixers", None)
    if mixers is None:
        raise ValueError(
            f"model: expected a MemoryForCausalLM, or a layer of membydesign.layers, got {type(model).__name__}"
        )
    return {f"layer {i} ({model.config.layers[i]})": layer for i, layer in enumerate(mixers())}


def _operator_of(place: str, layer: SequenceLayer) -> str:
    """What runs a layer in ONNX; refuses one that nothing does."""
    if isinstance(layer, FilterLayer):
        support = onnx_operator(layer.design, layer.key_dim, layer.value_dim)
        if support.operator is None:
            raise ValueError(f"model: expected layers that ONNX can run, got {place}: {support.reason}")
        return support.operator
    if layer.initial_belief() is None:
        raise ValueError(f"model: expected layers that ONNX can run, got {place}: {layer.no_initial_belief}")
    return "attention" if isinstance(layer, SoftmaxAttention) else type(layer).__name__


def _initial(layer: SequenceLayer) -> LayerBelief:
    belief = layer.initial_belief()
    assert belief is not None
    return belief


def _refuse_weights(model: nn.Module) -> None:
    """Refuse weights that are not float32 on the CPU."""
    for name, x in model.named_parameters():
        if x.dtype != torch.float32 or x.device.type != "cpu":
            raise ValueError(
                f"model: expected float32 weights on the CPU (model.float().cpu()), got {name} in {x.dtype} on "
                f"{x.device}"
            )


@contextmanager
def _need_onnx(*packages: str) -> Iterator[None]:
    """Say what to install if a package is missing."""
    try:
        for package in packages:
            import_module(package)
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in packages:
            raise
        raise ModuleNotFoundError(f"export needs {error.name}: {install_hint('onnx')}", name=error.name) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what torch's exporter says about itself."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off for as long as the model is traced."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode
