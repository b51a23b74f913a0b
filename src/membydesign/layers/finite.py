"""Why a layer's numbers are not finite: its weights, its input or the range of its type.

Looked up only after something has failed, so that good calls cost nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from membydesign.errors import NonFiniteError
from membydesign.filter.transforms import values

if TYPE_CHECKING:
    from torch import Tensor, nn


def weight_error(place: str, module: nn.Module, prefix: str = "") -> NonFiniteError | None:
    """Return the error for a weight that holds NaN or infinity, with the likely cause; None if all weights are finite.

    Args:
        place: whose weights they are, for the message.
        module: the owner.
        prefix: of the names of its weights.
    """
    bad = (item for item in module.named_parameters(prefix) if not bool(torch.isfinite(values(item[1])).all()))
    name, weight = next(bad, (None, None))
    if weight is None:
        return None
    cause = "Training diverged, or it was stored so: use a smaller learning rate, or clip gradients"
    if weight.dtype == torch.float16:
        cause = (
            "Adam makes float16 weights NaN, since its eps of 1e-8 is 0 in float16: train in bfloat16 "
            "(model.bfloat16()), or keep float32 weights and use torch.autocast with bfloat16"
        )
    return NonFiniteError(f"{place}: the weight {name} holds NaN or infinity ({weight.dtype}). {cause}")


def first_bad(x: Tensor) -> str | None:
    """Describe the first value that is not finite and its index; None if all are finite."""
    finite = torch.isfinite(values(x))
    if bool(finite.all()):
        return None
    index = (~finite).nonzero()[0].tolist()
    return f"{values(x)[tuple(index)].item()} at index {index}"
