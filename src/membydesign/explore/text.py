"""What the memories of a language model believe while it reads a text: measured token by token, for every head."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from membydesign.filter import loop
from membydesign.filter.checks import check_inputs
from membydesign.filter.inputs import Request
from membydesign.layers import FilterLayer
from membydesign.state import Sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from membydesign.design import Design

MEASURES = ("variance", "gain", "evidence")
BYTES = 900_000
"""How much of a page the numbers may take, so that a whole page stays below 1 MB."""


class Head(NamedTuple):
    """The numbers of one head of one layer, [T] each; NaN where its design has no such number.

    Attributes:
        layer: which memory layer of the model, from 1.
        head: which of its heads, from 1.
        design: the title of its design.
        variance: how unsure the read at each token is, after the write at that token; the mean over noise groups.
        gain: how much of its error along the key the write corrects, between 0 and 1.
        evidence: how expected the written value was, in nats per entry.
    """

    layer: int
    head: int
    design: str
    variance: Tensor
    gain: Tensor
    evidence: Tensor


@dataclass(frozen=True)
class Reading:
    """A text as a model read it.

    Attributes:
        model: what to call the model.
        tokens: the part of the text that is each token, with what was left out before it.
        left_out: how many tokens of the text are not here, so that the page stays small.
        loss: nats of each token given those before it, [T]; NaN for the first.
        heads: in the order of layers and heads.
    """

    model: str
    tokens: Sequence[str]
    left_out: int
    loss: Tensor
    heads: Sequence[Head]

    def as_dict(self) -> dict[str, Any]:
        """Return what the page takes: numbers are float32 in base64, [heads, T] for each measure."""
        rows = {name: torch.stack([getattr(head, name) for head in self.heads]) for name in MEASURES}
        return {
            "model": self.model,
            "tokens": list(self.tokens),
            "left_out": self.left_out,
            "heads": [{"layer": head.layer, "head": head.head, "design": head.design} for head in self.heads],
            **{name: _packed(x) for name, x in {"loss": self.loss, **rows}.items()},
        }


def _packed(x: Tensor) -> str:
    """Little-endian float32 numbers in base64."""
    import numpy

    return base64.b64encode(x.float().numpy().astype(numpy.dtype("<f4")).tobytes()).decode()


@torch.no_grad()
def read(model: nn.Module, tokenizer: Any, text: str, name: str) -> Reading:
    """Let a model read a text, and measure all of its memories.

    Args:
        model: a causal language model whose layers are memories, or some of them.
        tokenizer: its tokenizer.
        text: what to read.
        name: what to call the model.

    Raises:
        ValueError: if the model has no memory layers, or the text no tokens.
    """
    layers = [module for module in model.modules() if isinstance(module, FilterLayer)]
    if not layers:
        raise ValueError("--model: expected a model with memory layers, got one without any")
    ids, tokens = _tokens(tokenizer, text)
    if not tokens:
        raise ValueError("--text: expected a text with at least one token, got none")
    size = model.get_input_embeddings().weight.shape[0]  # pyright: ignore
    if int(ids.max()) >= size:
        raise ValueError(
            f"--model: expected a tokenizer of at most {size} tokens, as the model has, got {int(ids.max())}"
        )
    rows = sum(layer.num_heads for layer in layers)
    most = max(1, BYTES // (16 * (rows + 1) + 16))
    ids, shown = ids[:, :most], tokens[:most]

    received: dict[nn.Module, Tensor] = {}

    def record(layer: nn.Module, given: tuple[Any, ...]) -> None:
        received[layer] = given[0]

    hooks = [layer.register_forward_pre_hook(record) for layer in layers]
    try:
        logits = model(ids.to(next(model.parameters()).device)).logits
    finally:
        for hook in hooks:
            hook.remove()
    log_p = logits[0, :-1].float().log_softmax(-1)
    loss = -log_p.gather(-1, ids[0, 1:, None].to(log_p.device))[:, 0].cpu()
    heads = [head for i, layer in enumerate(layers) for head in _heads(layer, received[layer], i + 1)]
    return Reading(name, shown, len(tokens) - len(shown), torch.cat([torch.full((1,), torch.nan), loss]), heads)


def _tokens(tokenizer: Any, text: str) -> tuple[Tensor, list[str]]:
    """Return ids, [1,T], and the part of the text that belongs to each of them."""
    if not getattr(tokenizer, "is_fast", False):
        ids = tokenizer(text)["input_ids"]
        return torch.tensor([ids]).long(), [tokenizer.decode([i]) for i in ids]
    found = tokenizer(text, return_offsets_mapping=True)
    tokens, done = [], 0
    for i, (start, end) in zip(found["input_ids"], found["offset_mapping"], strict=True):
        tokens.append(text[done:end] if end > done else tokenizer.decode([i]) if start == end else "")
        done = max(done, end)
    return torch.tensor([found["input_ids"]]).long(), tokens


def _heads(layer: FilterLayer, x: Tensor, number: int) -> list[Head]:
    """Run the specification of the filter in float64 over what a layer received, and measure each head."""
    given, _ = layer.step_inputs(x, None, None)
    design: Design = layer.design
    exact = check_inputs(design, given.q, given.k, given.v, given.parameters, lead="B,T,H", state_dtype=torch.float64)
    sizes = Sizes(1, layer.num_heads, layer.key_dim, layer.value_dim)
    prior = design.prior(sizes, dtype=torch.float64, device=x.device)
    run = loop.run(design, Request(exact, prior, torch.float64, "torch", None, True, True, None))
    noise, T = design.observation_noise(exact.parameters), x.shape[1]
    unknown = x.new_full((T, layer.num_heads), torch.nan, dtype=torch.float64)
    gain = unknown
    if noise is not None and run.precision is not None:
        gain = (1 - noise.expand_as(run.precision) * run.precision)[0].mean(-1)
    variance = unknown if run.variance is None else run.variance[0].mean(-1)
    evidence = unknown if run.write_log_evidence is None else run.write_log_evidence[0] / layer.value_dim
    return [
        Head(number, h + 1, design.title, *(x[:, h].cpu() for x in (variance, gain, evidence)))
        for h in range(layer.num_heads)
    ]
