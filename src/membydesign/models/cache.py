"""What a model remembers between calls: one belief for each layer, of constant size whatever came before."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from membydesign.layers import LayerBelief

if TYPE_CHECKING:
    from os import PathLike

    import torch
    from torch import Tensor


class MemoryCacheLayer(CacheLayerMixin):
    """The belief of one layer, and how many tokens it has seen (padding included)."""

    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.belief: LayerBelief | None = None
        self.seen = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: a belief comes from its layer."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused: a memory keeps a belief, not keys and values."""
        raise TypeError("a MemoryCache keeps beliefs, not keys and values; it goes with a MemoryModel only")

    def remember(self, belief: LayerBelief) -> None:
        """Take the belief after more tokens."""
        self.belief = belief
        self.is_initialized = True

    def __deepcopy__(self, memo: dict[int, Any]) -> MemoryCacheLayer:
        copied = type(self)()
        vars(copied).update(vars(self))
        if self.belief is not None:  # clones may belong to an autograd graph, where copy.deepcopy refuses tensors
            copied.belief = self.belief.map(lambda x: x.clone())
        return copied

    def get_seq_length(self) -> int:
        """How many tokens were seen, padding included."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As for a layer that keeps all keys, because a mask covers all tokens."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """-1: there is no end."""
        return -1

    def get_max_cache_shape(self) -> int:
        """-1: what earlier versions of Transformers 5 call it."""
        return self.get_max_length()

    @property
    def batch_size(self) -> int:
        """How many sequences; -1 before the first."""
        return -1 if self.belief is None else self.belief.batch

    def reset(self) -> None:
        """Forget everything."""
        self.belief, self.seen, self.is_initialized = None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes what sequence beam_idx[i] was."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some sequences, in a new order."""
        if self.belief is not None:
            self.belief = self.belief.map(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence several times."""
        if self.belief is not None:
            self.belief = self.belief.map(lambda x: x.repeat_interleave(repeats, 0))

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: a belief cannot forget its last tokens."""
        if tokens_to_remove:
            raise ValueError(
                "crop: expected 0, since a belief cannot forget its last tokens (copy the cache before them instead), "
                f"got {tokens_to_remove}"
            )

    def offload(self) -> None:
        """To the CPU."""
        if self.belief is not None:
            self.device = next(part.device for _, part in self.belief.parts())
            self.belief = self.belief.map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Back to where it was."""
        if self.belief is not None and hasattr(self, "device"):
            self.belief = self.belief.map(lambda x: x.to(self.device, non_blocking=True))


class MemoryCache(Cache):
    """The beliefs of all layers of a model.

    `model(..., use_cache=True).past_key_values` is one. Pass it on to continue, `copy.deepcopy` it to continue in two
    ways, or `save` it and go on another day.

    Args:
        num_layers: how many layers the model has.
    """

    layers: list[MemoryCacheLayer]

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[MemoryCacheLayer() for _ in range(num_layers)])

    def detach(self) -> MemoryCache:
        """The same cache, cut off from the autograd graph: for training on one segment of a text after another."""
        for layer in self.layers:
            if layer.belief is not None:
                layer.remember(layer.belief.detach())
        return self

    def save(self, path: str | PathLike[str]) -> None:
        """Write everything to a safetensors file."""
        tensors: dict[str, Tensor] = {}
        kinds: list[str | None] = []
        for i, layer in enumerate(self.layers):
            kinds.append(None if layer.belief is None else type(layer.belief).__name__)
            for name, part in () if layer.belief is None else layer.belief.parts():
                tensors[f"{i}.{name}"] = part.detach().contiguous().clone()
        about = {"kinds": kinds, "seen": [layer.seen for layer in self.layers]}
        save_file(tensors, path, {"memory_cache": json.dumps(about)})

    @classmethod
    def load(cls, path: str | PathLike[str], device: torch.device | str = "cpu") -> MemoryCache:
        """Read what `save` wrote."""
        with safe_open(path, "pt") as file:
            about = (file.metadata() or {}).get("memory_cache")
        if about is None:
            raise ValueError(f"path: expected a file that MemoryCache.save wrote, got {str(path)!r}")
        about = json.loads(about)
        tensors = load_file(path, str(device))
        known = {kind.__name__: kind for kind in LayerBelief.__subclasses__()}
        cache = cls(len(about["kinds"]))
        for i, (layer, kind, seen) in enumerate(zip(cache.layers, about["kinds"], about["seen"], strict=True)):
            layer.seen = seen
            if kind is None:
                continue
            if kind not in known:
                raise ValueError(f"path: expected beliefs of kinds {', '.join(known)}, got {kind!r} in {str(path)!r}")
            parts = {name.partition(".")[2]: x for name, x in tensors.items() if name.partition(".")[0] == str(i)}
            layer.remember(known[kind].of_parts(parts))
        return cache
