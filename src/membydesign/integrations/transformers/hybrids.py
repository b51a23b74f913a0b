"""Transformers models of which some recurrent layers are Bayesian: their classes, and `retrofit_transformers`.

Importing this module registers them with the Auto classes, so that `AutoModelForCausalLM.from_pretrained` reads what
`save_pretrained` wrote without running any code from the folder.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from membydesign.integrations.transformers.acceleration import LAYERS, VERSIONS
from membydesign.integrations.transformers.bayesian import bayesian

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

PREFIXES = {"qwen3_next": "Qwen3Next", "qwen3_5": "Qwen3_5", "olmo_hybrid": "OlmoHybrid", "kimi_linear": "KimiLinear"}
"""Teachers, by the names of their modules in Transformers, and what the names of their classes begin with."""


class Hybrid(NamedTuple):
    """The classes of a teacher and of its students.

    Attributes:
        layer: of the teacher's recurrent layers.
        model: of the teacher.
        config: of students.
        student: of students.
    """

    layer: type[nn.Module]
    model: type[Any]
    config: type[Any]
    student: type[Any]


def _hybrid(family: str, prefix: str) -> Hybrid:
    """Make and register the classes for a family of teachers."""
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    teacher: Any = getattr(module, f"{prefix}ForCausalLM")
    layer: Any = getattr(module, LAYERS[family])
    base: Any = teacher.config_class

    config = type(
        f"Bayesian{base.__name__}",
        (base,),
        {
            "__doc__": f"The configuration of a {prefix} model with Bayesian layers: their indices and options.",
            "__annotations__": {"bayesian_layers": "list | None", "bayesian_options": "dict | None"},
            "__module__": __name__,
            "model_type": f"bayesian_{base.model_type}",
            "bayesian_layers": None,
            "bayesian_options": None,
        },
    )

    def __init__(self: Any, config: Any) -> None:
        teacher.__init__(self, config)
        for i in config.bayesian_layers or ():
            block = self.model.layers[i]
            name = mixer_name(block, layer)
            if name is None:
                raise ValueError(f"bayesian_layers: expected indices of a {layer.__name__}, got {i}")
            setattr(block, name, bayesian(layer)(config, i))
        self.post_init()

    student = type(
        f"Bayesian{prefix}ForCausalLM",
        (teacher,),
        {
            "__doc__": f"A {prefix} model in which some layers are Bayesian.",
            "__annotations__": {"config": config},
            "__module__": __name__,
            "config_class": config,
            "__init__": __init__,
        },
    )
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModelForCausalLM.register(config, student, exist_ok=True)
    return Hybrid(layer, teacher, config, student)


def mixer_name(block: nn.Module, layer: type[nn.Module]) -> str | None:
    """The attribute of a block that holds its recurrent layer; None if it has none of this class."""
    return next((name for name, child in block.named_children() if type(child) is layer), None)


HYBRIDS: dict[str, Hybrid] = {}
"""By family; empty in versions of Transformers whose layers are not known."""
if ".".join(transformers.__version__.split(".")[:2]) in VERSIONS:
    HYBRIDS = {family: _hybrid(family, prefix) for family, prefix in PREFIXES.items()}
    globals().update({kind.__name__: kind for hybrid in HYBRIDS.values() for kind in (hybrid.config, hybrid.student)})


def is_teacher(model: object) -> bool:
    """Whether a model is of a class that `retrofit_transformers` takes."""
    return any(type(model) is hybrid.model for hybrid in HYBRIDS.values())


def teachers() -> list[str]:
    """The names of the classes that `retrofit_transformers` takes."""
    return [hybrid.model.__name__ for hybrid in HYBRIDS.values()]


def retrofit_transformers(
    teacher: Any,
    layers: Sequence[int],
    transition: str | None,
    *,
    process_noise: Literal["learned", "stationary"],
    write_noise: Literal["gate", "softplus"],
) -> Any:
    """Copy a Transformers model and make some of its recurrent layers Bayesian; `membydesign.retrofit.retrofit`.

    All parameters of the teacher are inherited, also decays and gates. Process noise, angles and rates of rows are new;
    angles and rates start where they change nothing.
    """
    hybrid = next(hybrid for hybrid in HYBRIDS.values() if type(teacher) is hybrid.model)
    places, blocks = list(layers), teacher.model.layers
    if not places:
        raise ValueError("layers: expected at least one index, got none")
    for i in places:
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < len(blocks):
            raise ValueError(f"layers: expected indices from 0 to {len(blocks) - 1}, got {i!r}")
        if places.count(i) > 1:
            raise ValueError(f"layers: expected each index once, got {i} {places.count(i)} times")
        if mixer_name(blocks[i], hybrid.layer) is None:
            kind = teacher.config.layer_types[i]
            raise ValueError(f"layers: expected indices of a {hybrid.layer.__name__}, got {i}, where there is {kind}")
    of_rows = hybrid.layer.__name__ == LAYERS["kimi_linear"]
    transition = transition or ("diagonal" if of_rows else "rotation")
    if of_rows and transition != "diagonal":
        raise ValueError(f'transition: expected "diagonal" for KDA, whose rows decay one by one, got {transition!r}')
    options = {"transition": transition, "process_noise": process_noise, "write_noise": write_noise}
    known = {
        name: value for name, value in teacher.config.to_dict().items() if name not in ("model_type", "architectures")
    }
    config = hybrid.config(**{**known, "bayesian_layers": sorted(places), "bayesian_options": options})
    config._attn_implementation = teacher.config._attn_implementation
    first = next(teacher.parameters())
    with torch.random.fork_rng(devices=[]):
        student = hybrid.student(config).to(device=first.device, dtype=first.dtype)
    missing, unexpected = student.load_state_dict(teacher.state_dict(), strict=False)
    assert not unexpected, unexpected
    assert all(name.rpartition(".")[2] in NEW or ".process_noise." in name for name in missing), missing
    student.generation_config = teacher.generation_config
    for name, p in teacher.named_parameters():
        student.get_parameter(name).requires_grad_(p.requires_grad)
    return student.train(teacher.training)


NEW = ("angle", "row_rate")
"""Parameters of Bayesian layers that teachers do not have, besides those of the process noise."""
