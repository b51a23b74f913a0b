"""What a model remembers between calls: one belief for each layer, of constant size whatever came before."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from membydesign.layers import LayerBelief

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

    import torch
    from torch import Tensor


class LayerContents(NamedTuple):
    """What a cache holds of one layer.

    Attributes:
        belief: the belief of the layer; None before the first token.
        seen: tokens seen, padding included.
    """

    belief: LayerBelief | None = None
    seen: int = 0

    def map(self, f: Callable[[Tensor], Tensor]) -> LayerContents:
        """Apply f to every tensor of the belief."""
        return self if self.belief is None else self._replace(belief=self.belief.map(f))


class _Shared:
    """The contents of all layers, shared by a cache and its layers.

    One attribute holds them, and beliefs never change in place. So replacing it updates or restores all layers at
    once, and no error or Ctrl-C can leave some layers updated and others not.
    """

    def __init__(self, layers: int) -> None:
        self.contents = (LayerContents(),) * layers

    def put(self, index: int, contents: LayerContents) -> None:
        self.contents = (*self.contents[:index], contents, *self.contents[index + 1 :])

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        copied = _Shared(0)
        # Clones may belong to an autograd graph, where copy.deepcopy refuses tensors.
        copied.contents = tuple(layer.map(lambda x: x.clone()) for layer in self.contents)
        memo[id(self)] = copied
        return copied


class MemoryCacheLayer(CacheLayerMixin):
    """The belief of one layer, and how many tokens it has seen (padding included).

    Args:
        shared: the contents of all layers of its cache; None for a layer by itself.
        index: which of them are its own.
    """

    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, shared: _Shared | None = None, index: int = 0) -> None:
        super().__init__()
        self._shared, self._index = _Shared(1) if shared is None else shared, index

    @property
    def contents(self) -> LayerContents:
        """Belief and number of tokens."""
        return self._shared.contents[self._index]

    @property
    def belief(self) -> LayerBelief | None:
        """The belief of the layer; None before the first token."""
        return self.contents.belief

    @property
    def seen(self) -> int:
        """How many tokens were seen, padding included."""
        return self.contents.seen

    @property
    def is_initialized(self) -> bool:
        """Whether there is a belief."""
        return self.belief is not None

    @is_initialized.setter
    def is_initialized(self, value: bool) -> None:
        """Do nothing: the constructor of Transformers sets what is derived here."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: a belief comes from its layer."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused: a memory keeps a belief, not keys and values."""
        raise TypeError("a MemoryCache keeps beliefs, not keys and values; it goes with a MemoryModel only")

    def _map(self, f: Callable[[Tensor], Tensor]) -> None:
        self._shared.put(self._index, self.contents.map(f))

    def get_seq_length(self) -> int:
        """How many tokens were seen, padding included."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As for a layer that keeps all keys, because a mask covers all tokens."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: no limit."""
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
        self._shared.put(self._index, LayerContents())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes what sequence beam_idx[i] was."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some sequences, in a new order."""
        self._map(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence several times."""
        self._map(lambda x: x.repeat_interleave(repeats, 0))

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
            self._map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Back to where it was."""
        if hasattr(self, "device"):
            self._map(lambda x: x.to(self.device, non_blocking=True))


class MemoryCache(Cache):
    """The beliefs of all layers of a model.

    `model(..., use_cache=True).past_key_values` is one. Pass it on to continue, `copy.deepcopy` it to continue in two
    ways, or `save` it and go on another day. A call that raises, even KeyboardInterrupt, leaves the cache as it was.

    Args:
        num_layers: how many layers the model has.
    """

    layers: list[MemoryCacheLayer]

    def __init__(self, num_layers: int) -> None:
        self._shared = _Shared(num_layers)
        super().__init__(layers=[MemoryCacheLayer(self._shared, i) for i in range(num_layers)])

    @property
    def contents(self) -> tuple[LayerContents, ...]:
        """What it holds of each layer; assigning replaces all at once."""
        return self._shared.contents

    @contents.setter
    def contents(self, contents: tuple[LayerContents, ...]) -> None:
        self._shared.contents = contents

    def map(self, f: Callable[[Tensor], Tensor]) -> None:
        """Apply f to every tensor of all beliefs; if it raises, nothing has changed."""
        self.contents = tuple(layer.map(f) for layer in self.contents)

    def advance(self, beliefs: Sequence[LayerBelief | None], tokens: int) -> None:
        """Replace all beliefs by those after more tokens.

        Args:
            beliefs: new belief of each layer.
            tokens: tokens that were read, padding included.
        """
        pairs = zip(beliefs, self.contents, strict=True)
        self.contents = tuple(LayerContents(belief, old.seen + tokens) for belief, old in pairs)

    def detach(self) -> MemoryCache:
        """The same cache, cut off from the autograd graph: for training on one segment of a text after another."""
        self.map(lambda x: x.detach())
        return self

    def reset(self) -> None:
        """Forget everything."""
        self.contents = (LayerContents(),) * len(self.contents)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes what sequence beam_idx[i] was."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some sequences, in a new order."""
        self.map(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence several times."""
        self.map(lambda x: x.repeat_interleave(repeats, 0))

    def save(self, path: str | PathLike[str]) -> None:
        """Write everything to a safetensors file."""
        tensors: dict[str, Tensor] = {}
        kinds: list[str | None] = []
        for i, layer in enumerate(self.layers):
            kinds.append(None if layer.belief is None else type(layer.belief).__name__)
            for name, part in () if layer.belief is None else layer.belief.parts():
                tensors[f"{i}.{name}"] = part.detach().contiguous().clone()
        forms = [None if layer.belief is None else layer.belief.form() for layer in self.layers]
        about = {"kinds": kinds, "forms": forms, "seen": [layer.seen for layer in self.layers]}
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
        forms = about.get("forms") or [{}] * len(cache.layers)
        contents: list[LayerContents] = []
        for i, (kind, form, seen) in enumerate(zip(about["kinds"], forms, about["seen"], strict=True)):
            if kind is None:
                contents.append(LayerContents(None, seen))
                continue
            if kind not in known:
                raise ValueError(f"path: expected beliefs of kinds {', '.join(known)}, got {kind!r} in {str(path)!r}")
            parts = {name.partition(".")[2]: x for name, x in tensors.items() if name.partition(".")[0] == str(i)}
            belief = known[kind].of_parts(parts, form if "forms" in about else _form_by_names(parts))
            contents.append(LayerContents(belief, seen))
        cache.contents = tuple(contents)
        return cache


class unchanged_on_error:
    """Context manager: restores a cache if the code inside raises, whatever part of it has been updated by then.

    Args:
        cache: the cache; anything else, such as None, is left alone.
    """

    def __init__(self, cache: object) -> None:
        self.cache = cache if isinstance(cache, MemoryCache) else None

    def __enter__(self) -> None:
        if self.cache is not None:
            self.before = self.cache.contents

    def __exit__(self, kind: object, *_: object) -> None:
        if self.cache is not None and kind is not None:
            self.cache.contents = self.before


def _form_by_names(parts: dict[str, Tensor]) -> dict[str, Any]:
    """The form of a belief from the names of its tensors, as files of version 0.1.0 have it."""
    form: dict[str, Any] = {}
    for name in sorted(parts):
        field, _, part = name.partition(".")
        if not part:
            form[field] = "tensor"
        elif part.isdigit():
            form.setdefault(field, ["tuple", {}])[1][part] = "tensor"
        else:
            form[field] = [
                "Belief",
                {"mean": "tensor", "covariance": "tensor" if f"{field}.covariance" in parts else None},
            ]
    return form
