r"""Models whose addresses are inputs, identical except for the update of their memories.

A token becomes a residual stream by a learned embedding; its address $\bar k_t$ goes unchanged to every layer and head
as key and query. Values come from the normalised stream, and so do gates and noises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from membydesign.design import Dense, DesignModel, Diagonal, Gate, Identity, Learned, catalogue
from membydesign.filter import filter_sequence
from membydesign.layers.parameters import LearnedParameter
from membydesign.models.modeling import SwiGLU

if TYPE_CHECKING:
    from collections.abc import Mapping

    from membydesign.data.recall import Addressed
    from membydesign.design.sources import Source


@dataclass(frozen=True)
class Update:
    """The update of a memory: a design, and the sources of its step parameters.

    Attributes:
        title: its name in figures and tables.
        design: what the memory assumes.
        noises: its variances, by name.
        row_gate: for a decay of each row, σ(W_g h + b_g), the value at which the gates start; None for no decay.
        last_norm: whether the stream is normalised before the readout. If not, what is read less strongly is answered
            less surely.
    """

    title: str
    design: DesignModel
    noises: Mapping[str, Source] = field(default_factory=dict)
    row_gate: float | None = None
    last_norm: bool = True


PRIOR, WRITE_NOISE, PROCESS_NOISE = 3.0, 0.05, 0.05
r"""$p_0$, $r^2$ and $\ell^2$ of the paper."""

_dense = catalogue["bayesian_layer"].replace(transition=Identity(), covariance=Dense(PRIOR))
_diagonal = _dense.replace(covariance=Diagonal(PRIOR))
_reset = catalogue["covariance_reset"].replace(transition=Identity())
_kept = {"process_noise": Learned(PROCESS_NOISE), "write_noise": WRITE_NOISE}
_from_one = {"process_noise": Learned(math.log(2)), "write_noise": WRITE_NOISE}
_noiseless = {"prior_variance": 1.0, "write_noise": 0.0}

UPDATES = {
    "linear_attention": Update("Linear Attention", catalogue["linear_attention"], _noiseless),
    "gla_style": Update("GLA-style", catalogue["gla"], _noiseless, row_gate=0.99),
    "deltanet_style": Update(
        "DeltaNet-style", catalogue["deltanet"], {"prior_variance": 1.0, "write_noise": Gate(0.5)}
    ),
    "covariance_reset": Update(
        "Covariance reset", _reset, {"prior_variance": PROCESS_NOISE, "write_noise": WRITE_NOISE}
    ),
    "bayesian_layer_diagonal": Update("Diagonal covariance", _diagonal, _kept),
    "bayesian_layer": Update("Bayesian Layer", _dense, _kept),
    # What the paper leaves open, one change each.
    "covariance_reset_learned": Update(
        "Covariance reset, learned ℓ²", _reset, {"prior_variance": Learned(PROCESS_NOISE), "write_noise": WRITE_NOISE}
    ),
    "bayesian_layer_diagonal_from_069": Update("Diagonal covariance, ℓ² from 0.69", _diagonal, _from_one),
    "bayesian_layer_from_069": Update("Bayesian Layer, ℓ² from 0.69", _dense, _from_one),
    "gla_style_from_half": Update("GLA-style, gates from 0.5", catalogue["gla"], _noiseless, row_gate=0.5),
}
"""The updates by name."""

UNBOUNDED_STARTS = {"5e-2": 0.05, "1e-3": 1e-3, "1e-5": 1e-5}
"""Where ℓ² starts if nothing keeps it above a floor."""

SMALL_NOISE: dict[str, Update] = {
    **{
        f"bayesian_layer_no_floor_{text}": replace(
            UPDATES["bayesian_layer"],
            title=f"Bayesian Layer, ℓ² without a floor from {text}",
            noises={"process_noise": Learned(start, floor=0.0), "write_noise": WRITE_NOISE},
        )
        for text, start in UNBOUNDED_STARTS.items()
    },
    "bayesian_layer_fixed_1e-6": replace(
        UPDATES["bayesian_layer"],
        title="Bayesian Layer, ℓ² fixed at 1e-6",
        noises={"process_noise": 1e-6, "write_noise": WRITE_NOISE},
    ),
}
"""Memories that may drift as little as training makes them: where more keys than dimensions are written once each,
nothing drifts."""
UPDATES |= SMALL_NOISE

COMPARED = tuple(UPDATES)[:6]
"""The paper's five updates and the diagonal covariance."""

UNNORMED = {
    f"{name}_unnormed": replace(UPDATES[name], title=f"{UPDATES[name].title}, no last norm", last_norm=False)
    for name in COMPARED
}
"""The same with a readout that sees how strongly memories answer."""
UPDATES |= UNNORMED

PAPER_UPDATES = tuple(update for update in COMPARED if update != "bayesian_layer_diagonal")
"""Those that the paper's panels (c) and (d) show."""


class AddressedMemory(nn.Module):
    """A mixer: values, gates and noises come from the stream; keys and queries are inputs.

    Args:
        update: of its memories.
        hidden_size: the width of the stream.
        num_heads: H.
        head_dim: D, rows and columns of each head's memory.
    """

    def __init__(self, update: Update, hidden_size: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.design, self.heads = update.design, (num_heads, head_dim)
        self.v_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.noises = nn.ModuleDict(
            {name: LearnedParameter(name, source, hidden_size, (num_heads,)) for name, source in update.noises.items()}
        )
        self.row_gate = None
        if update.row_gate is not None:
            self.row_gate = nn.Linear(hidden_size, num_heads * head_dim)
            nn.init.zeros_(self.row_gate.weight)
            nn.init.constant_(self.row_gate.bias, math.log(update.row_gate / (1 - update.row_gate)))

    def forward(self, x: Tensor, q: Tensor, k: Tensor, last: int) -> Tensor:
        """Mix x, [B,T,hidden_size], writing at k and reading at q, [B,T,D]; return the outputs of the last tokens."""
        v = self.v_proj(x).unflatten(-1, self.heads)
        parameters = {name: variance(x) for name, variance in self.noises.items()}
        if self.row_gate is not None:
            parameters["log_decay"] = F.logsigmoid(self.row_gate(x)).unflatten(-1, self.heads)
        shared = (-1, -1, self.heads[0], -1)  # every head has the same addresses
        y = filter_sequence(self.design, q[:, :, None].expand(shared), k[:, :, None].expand(shared), v, **parameters)
        return self.o_proj(y.output[:, -last:].flatten(-2))


class AddressedModel(nn.Module):
    """Two pre-norm layers of memory and SwiGLU, read at the queries that end each sequence.

    No positions: tokens carry their addresses and types. In the last layer only the queries are read and pass through
    the MLP, since the others are not used.

    Args:
        update: of all memories.
        token_dim: the size of a token.
        labels: of the answer.
        address_dim: D.
        query_writes: whether a query, which carries no value, writes to memories. If not, its write key is zero.
    """

    def __init__(
        self,
        update: Update,
        token_dim: int,
        labels: int,
        *,
        address_dim: int = 16,
        query_writes: bool = False,
        hidden_size: int = 64,
        num_heads: int = 4,
        inner_size: int = 128,
        num_layers: int = 2,
    ) -> None:
        super().__init__()
        self.query_writes = query_writes
        self.embedding = nn.Linear(token_dim, hidden_size)
        self.mixers = nn.ModuleList(
            [AddressedMemory(update, hidden_size, num_heads, address_dim) for _ in range(num_layers)]
        )
        self.mlps = nn.ModuleList([SwiGLU(hidden_size, inner_size, dropout=0.0) for _ in range(num_layers)])
        self.mixer_norms = nn.ModuleList([nn.RMSNorm(hidden_size, eps=1e-5) for _ in range(num_layers)])
        self.mlp_norms = nn.ModuleList([nn.RMSNorm(hidden_size, eps=1e-5) for _ in range(num_layers)])
        self.norm = nn.RMSNorm(hidden_size, eps=1e-5) if update.last_norm else nn.Identity()
        self.head = nn.Linear(hidden_size, labels)

    def forward(self, tokens: Tensor, addresses: Tensor, queries: int) -> Tensor:
        """Compute the logits of the last `queries` tokens, [B,Q,labels]."""
        T = tokens.shape[1]
        k = addresses
        if not self.query_writes:
            k = torch.cat([addresses[:, :-queries], torch.zeros_like(addresses[:, -queries:])], 1)
        h = self.embedding(tokens)
        layers = list(zip(self.mixer_norms, self.mixers, self.mlp_norms, self.mlps, strict=True))
        for i, (mixer_norm, mixer, mlp_norm, mlp) in enumerate(layers, 1):
            last = queries if i == len(layers) else T
            h = h[:, -last:] + mixer(mixer_norm(h), addresses, k, last)
            h = h + mlp(mlp_norm(h))
        return self.head(self.norm(h))

    def answer(self, batch: Addressed) -> Tensor:
        """Compute the logits at the queries of a batch, [B,Q,labels]."""
        return self(batch.tokens, batch.addresses, batch.answers.shape[1])


def losses(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the cross-entropy of every query, for the training loop."""
    answers = batch["answers"]
    logits = model(batch["tokens"], batch["addresses"], answers.shape[1])
    return F.cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="none")
