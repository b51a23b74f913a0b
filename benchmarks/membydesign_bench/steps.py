"""Time a training step of the experiments' models against the same models with Transformers' Gated DeltaNet."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from membydesign_bench.timing import Job, Row, Settings, interleaved
from membydesign_bench.works import transformers_function

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

PEER = "the same model with Transformers' Gated DeltaNet"
OURS = {"bayesian_layer": "Bayesian Layer", "gated_deltanet": "Gated DeltaNet"}


def steps(settings: Settings) -> Iterator[Job]:
    """Learned recall at batch 256 and n_f = 8, and MQAR at batch 256, L = 128 and width 128."""
    if find_spec("transformers") is None or find_spec("accelerate") is None:
        return
    yield Job("a training step of learned recall", partial(_recall, settings.rounds))
    yield Job("a training step of MQAR", partial(_mqar, settings.rounds))


def _works(
    models: Mapping[str, nn.Module], losses: Callable[[Any, Any], Tensor], batch: Any
) -> dict[str, Callable[[], object]]:
    def step(model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
        optimiser.zero_grad()
        losses(model, batch).mean().backward()
        optimiser.step()

    return {name: partial(step, m.train(), torch.optim.AdamW(m.parameters(), 1e-4)) for name, m in models.items()}


def _rows(task: str, size: str, works: dict[str, Callable[[], object]], rounds: int) -> list[Row]:
    times = interleaved(works, rounds)
    return [
        Row("steps", task, size, OURS[name], times[name], "ms", PEER, times["peer"]) for name in works if name in OURS
    ]


class TheirDelta(nn.Module):
    """Transformers' Gated DeltaNet rule between the projections of a mixer with given addresses.

    Args:
        hidden_size: the width of the stream.
        num_heads: H.
        head_dim: D.
    """

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = (num_heads, head_dim)
        self.v_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.gates = nn.Linear(hidden_size, 2 * num_heads)
        rule = transformers_function("qwen3_next", "torch_chunk_gated_delta_rule")
        assert rule is not None
        self.rule = rule

    def forward(self, x: Tensor, q: Tensor, k: Tensor, last: int) -> Tensor:
        """As `AddressedMemory` does it."""
        beta, decay = self.gates(x).chunk(2, -1)
        q, k = (a[:, :, None].expand(-1, -1, self.heads[0], -1) for a in (q * self.heads[1] ** 0.5, k))
        y, _ = self.rule(q, k, self.v_proj(x).unflatten(-1, self.heads), g=F.logsigmoid(decay), beta=beta.sigmoid())
        return self.o_proj(y[:, -last:].flatten(-2))


def _recall(rounds: int) -> list[Row]:
    from membydesign.data.recall import Collisions
    from membydesign.data.seeds import generator
    from membydesign.experiments.shared.addressed import UPDATES, AddressedModel, losses

    task = Collisions()
    drawn = task.sample(256, 8, (0.6, 0.8), generator("bench", "recall"))
    batch = {"tokens": drawn.tokens, "addresses": drawn.addresses, "answers": drawn.answers}
    models = {
        name: AddressedModel(UPDATES["bayesian_layer"], task.token_dim, task.labels)
        for name in ("bayesian_layer", "peer")
    }
    models["peer"].mixers = nn.ModuleList([TheirDelta(64, 4, 16) for _ in range(2)])
    size = f"256,4,{drawn.tokens.shape[1]},16"
    return _rows("learned recall, n_f = 8", size, _works(models, losses, batch), rounds)


class TheirLayer(nn.Module):
    """Transformers' Gated DeltaNet layer, with its projections, convolution and norm, in the place of one of ours.

    Args:
        width: of the stream.
        head_dim: D; values are twice as wide, so that the state is as large as the Bayesian Layer's.
    """

    def __init__(self, width: int, head_dim: int) -> None:
        super().__init__()
        from transformers import Qwen3NextConfig
        from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

        heads = width // head_dim
        config = Qwen3NextConfig(
            hidden_size=width,
            num_hidden_layers=1,
            linear_num_key_heads=heads,
            linear_num_value_heads=heads,
            linear_key_head_dim=head_dim,
            linear_value_head_dim=2 * head_dim,
        )
        self.layer = Qwen3NextGatedDeltaNet(config, 0)

    def forward(self, x: Tensor, belief: None = None, *, cu_seqlens: None = None) -> tuple[Tensor, None]:
        """As a `SequenceLayer` that keeps nothing."""
        del belief, cu_seqlens
        return self.layer(x), None


def _mqar(rounds: int) -> list[Row]:
    from membydesign.data.mqar import MQAR
    from membydesign.experiments.mqar.models import make_model
    from membydesign.experiments.mqar.training import at_queries, losses

    batch = at_queries(MQAR(length=128, pairs=16).sample(256, "bench"))
    models = {name: make_model(name) for name in ("bayesian_layer", "gated_deltanet")}
    models["peer"] = make_model("gated_deltanet")
    for block in models["peer"].language_model.model.layers:
        block.mixer = TheirLayer(128, 32)
    return _rows("MQAR, L = 128, D = 16, width 128", "256,4,128,32", _works(models, losses, batch), rounds)
