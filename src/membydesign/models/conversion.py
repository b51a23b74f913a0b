"""Gated DeltaNets that flash-linear-attention wrote, as `MemoryForCausalLM`: `load_fla`."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import torch
from transformers import GenerationConfig

from membydesign.files import read_object
from membydesign.models.checkpoint import Checkpoint, StoredTensor
from membydesign.models.fla_config import memory_config
from membydesign.models.modeling import MemoryForCausalLM

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from os import PathLike

    from membydesign.models.configuration import MemoryConfig

HEAD, EMBEDDINGS = "lm_head.weight", "model.embeddings.weight"


class Skipped(NamedTuple):
    """A stored tensor that is not part of the model.

    Attributes:
        name: what it is called in the file.
        elements: how many numbers it holds.
        why: why it is not needed.
    """

    name: str
    elements: int
    why: str


@dataclass(frozen=True)
class Conversion:
    """A converted model, and what became of the checkpoint.

    Attributes:
        model: the model, in evaluation mode.
        checkpoint: what was read.
        skipped: stored tensors that the model does not need.
        notes: what else a user should know.
    """

    model: MemoryForCausalLM
    checkpoint: Checkpoint
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...]

    @property
    def tensors(self) -> int:
        """How many tensors are stored in the checkpoint."""
        return len(self.checkpoint.tensors)

    @property
    def elements(self) -> int:
        """How many numbers are stored in the checkpoint."""
        return sum(stored.elements for stored in self.checkpoint.tensors.values())

    @property
    def parameters(self) -> int:
        """How many parameters the model has; shared ones count once."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def load_fla(
    source: str | PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    revision: str | None = None,
    ignore: Collection[str] = (),
) -> MemoryForCausalLM:
    """Load a Gated DeltaNet that flash-linear-attention saved, as a `MemoryForCausalLM`.

    Checkpoints of today and of December 2024 (whose MLP is fused) are told apart by their names and shapes. Only
    safetensors are read; flash-linear-attention is not needed.

    Args:
        source: a folder, or a name on the Hugging Face Hub.
        dtype: of the weights; by default as stored, and the widest if several are.
        device: where the model goes.
        revision: branch, tag or commit on the Hub.
        ignore: names of options in config.json not to look at.

    Raises:
        ValueError: if anything does not fit, with all that does not.
    """
    conversion = convert_fla(source, dtype=dtype, device=device, revision=revision, ignore=ignore)
    for note in conversion.notes:
        warnings.warn(note, stacklevel=2)
    return conversion.model


@torch.no_grad()
def convert_fla(
    source: str | PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    revision: str | None = None,
    ignore: Collection[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Convert as `load_fla` does, and report what was done.

    Args:
        source: as in `load_fla`.
        dtype: as in `load_fla`.
        device: as in `load_fla`.
        revision: as in `load_fla`.
        ignore: as in `load_fla`.
        progress: called with the number of parameters that are loaded, and that of all.
    """
    checkpoint = Checkpoint.open(source, revision)
    config = memory_config(checkpoint.config, ignore, len(checkpoint.tensors))
    skipped, notes = _tie(config, checkpoint)
    try:
        with torch.device("meta"):
            model = MemoryForCausalLM(config)
    except RuntimeError as error:  # sizes whose product exceeds 64 bits
        raise ValueError(f"source: expected a model that torch can represent in config.json, got {error}") from error
    matched = match({name: tuple(p.shape) for name, p in model.named_parameters()}, checkpoint.tensors)
    matched.refuse(checkpoint)
    dtype = _widest(part.stored for part in matched.parts.values()) if dtype is None else dtype
    if not dtype.is_floating_point:
        raise ValueError(f"dtype: expected a floating-point type, got {dtype}")
    model.to(dtype).to_empty(device=device)  # pyright: ignore[reportArgumentType]
    model.tie_weights()
    model.config.dtype = dtype
    done, total = 0, sum(parameter.numel() for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        part = matched.parts[name]
        parameter.copy_(part.stored.read(part.rows))
        done += parameter.numel()
        if progress is not None:
            progress(done, total)
    if (checkpoint.folder / "generation_config.json").exists():
        try:
            read_object(checkpoint.folder / "generation_config.json")  # whose errors are easier to read
            generation = GenerationConfig.from_pretrained(checkpoint.folder)
            generation.validate(strict=True)
            model.generation_config = generation
        except (OSError, ValueError, TypeError, AttributeError) as error:
            notes.append(f"generation_config.json is left out: {error}")
    return Conversion(model.eval(), checkpoint, (*matched.skipped, *skipped), tuple(notes))


class Part(NamedTuple):
    """Where a parameter comes from: a stored tensor, or some of its rows."""

    stored: StoredTensor
    rows: slice | None = None


@dataclass
class Matched:
    """Our parameters beside their tensors.

    Attributes:
        parts: where each of our parameters comes from, by our name.
        skipped: tensors that are known and not needed.
        problems: what does not fit, by kind.
    """

    parts: dict[str, Part] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)
    problems: dict[str, list[str]] = field(
        default_factory=lambda: {"unexpected": [], "missing": [], "wrong shape": [], "wrong type": []}
    )

    def refuse(self, checkpoint: Checkpoint) -> None:
        """Raise one error that lists all that does not fit, if anything does not."""
        listed = "".join(
            f"\n{kind} ({len(names)}):" + "".join(f"\n  {name}" for name in names)
            for kind, names in self.problems.items()
            if names
        )
        if listed:
            raise ValueError(
                "source: expected the tensors of the Gated DeltaNet that config.json describes, got others in "
                f"{str(checkpoint.folder)!r}{listed}"
            )


def their_name(ours: str) -> str:
    """What flash-linear-attention calls a parameter of ours.

    Examples:
        >>> their_name("model.layers.3.mixer.q_proj.weight"), their_name("model.layers.3.mixer_norm.weight")
        ('model.layers.3.attn.q_proj.weight', 'model.layers.3.attn_norm.weight')
    """
    if not ours.startswith("model.layers."):
        return ours
    return ours.replace(".mixer_norm.", ".attn_norm.", 1).replace(".mixer.", ".attn.", 1)


def match(expected: Mapping[str, tuple[int, ...]], stored: Mapping[str, StoredTensor]) -> Matched:
    """Find a stored tensor for each of our parameters.

    Args:
        expected: shapes of our parameters, by our names; shared ones once.
        stored: the checkpoint's tensors.
    """
    matched = Matched()
    unused = dict(stored)
    if HEAD not in expected:
        unused.pop(HEAD, None)  # tied: looked at elsewhere
    for ours, shape in expected.items():
        theirs, rows = their_name(ours), None
        if ours.endswith((".mlp.gate_proj.weight", ".mlp.up_proj.weight")):
            fused = theirs.replace(".up_proj.", ".gate_proj.")
            alone = theirs.replace(".gate_proj.", ".up_proj.") not in stored
            half = shape[0]
            if fused in stored and alone and stored[fused].shape == (2 * half, *shape[1:]):
                rows = slice(half, 2 * half) if ".up_proj." in theirs else slice(0, half)
                theirs, shape = fused, (2 * half, *shape[1:])
        if theirs not in stored:
            matched.problems["missing"].append(f"{theirs} {list(shape)}")
            continue
        unused.pop(theirs, None)
        part = matched.parts[ours] = Part(stored[theirs], rows)
        if part.stored.shape != shape:
            matched.problems["wrong shape"].append(f"{theirs}: expected {list(shape)}, got {list(part.stored.shape)}")
        if isinstance(part.stored.dtype, str):
            matched.problems["wrong type"].append(f"{theirs}: expected F16, BF16, F32 or F64, got {part.stored.dtype}")
    for name, tensor in unused.items():
        rates = expected.get(name.removesuffix(".attn.D") + ".mixer.A_log")
        if name.endswith(".attn.D") and rates == tensor.shape:
            matched.skipped.append(Skipped(name, tensor.elements, "no version of the layer ever read it"))
        else:
            matched.problems["unexpected"].append(f"{name} {list(tensor.shape)}")
    return matched


def _tie(config: MemoryConfig, checkpoint: Checkpoint) -> tuple[list[Skipped], list[str]]:
    """Find out whether the output layer shares the embedding's weights, and write it into the configuration.

    config.json has a say, and so has the file: a head that is not the embedding is not tied, whatever is said.
    """
    head, embeddings = checkpoint.tensors.get(HEAD), checkpoint.tensors.get(EMBEDDINGS)
    said = checkpoint.config.get("tie_word_embeddings")
    if head is None:
        config.tie_word_embeddings = said is None or bool(said)
        return [], []
    if said is False or embeddings is None or head.shape != embeddings.shape or head.dtype != embeddings.dtype:
        same = False
    else:
        same = torch.equal(head.read(), embeddings.read())
    config.tie_word_embeddings = same
    if same:
        return [Skipped(HEAD, head.elements, f"equals {EMBEDDINGS}, which it is tied to")], []
    notes = [f"{HEAD} is not {EMBEDDINGS}, although config.json says they are tied: loaded as untied"] if said else []
    return [], notes


def _widest(stored: Iterable[StoredTensor]) -> torch.dtype:
    types = {tensor.dtype for tensor in stored}
    return reduce(torch.promote_types, sorted(types, key=str))  # pyright: ignore[reportArgumentType]
