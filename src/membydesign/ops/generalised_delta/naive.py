r"""The generalised delta rule, one step: removal and writing have keys of their own.

    M_t = diag(w_t) M_{t-1} − b_t (M_{t-1}ᵀ κ_t)ᵀ + k_t v_tᵀ,        y_t = M_tᵀ q_t

The delta rule has κ = k, b = βk and v scaled by β; RWKV-7 has b = a ⊙ κ with a gate a of each row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from membydesign.products import product

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class Steps(NamedTuple):
    """What happens to memory at every token, in the state's type. A single step has no axis T.

    Attributes:
        log_decay: log w, at most 0, [B,T,H,D].
        removal_key: κ, what is read to be removed, [B,T,H,D].
        removal: b, where it is removed, [B,T,H,D].
        k: write keys, [B,T,H,D].
        v: written values, [B,T,H,M].
        q: queries, [B,T,H,D].
    """

    log_decay: Tensor
    removal_key: Tensor
    removal: Tensor
    k: Tensor
    v: Tensor
    q: Tensor

    def map(self, f: Callable[[Tensor], Tensor]) -> Steps:
        """The same with f applied to each."""
        return Steps._make(f(x) for x in self)


def step(M: Tensor, x: Steps) -> tuple[Tensor, Tensor]:
    """One removal, write and read: M_t, [B,H,D,M], and y_t, [B,H,M]."""
    found = product(x.removal_key[..., None, :], M)
    removed = x.removal[..., None] * found
    M = x.log_decay.exp()[..., None] * M - removed + x.k[..., None] * x.v[..., None, :]
    return M, product(x.q[..., None, :], M)[..., 0, :]


def run(M: Tensor, x: Steps) -> tuple[Tensor, Tensor]:
    """Token by token: outputs [B,T,H,M] and the memory at the end."""
    outputs = []
    for t in range(x.q.shape[1]):
        M, y = step(M, x.map(lambda part, t=t: part[:, t]))
        outputs.append(y)
    return torch.stack(outputs, 1), M
