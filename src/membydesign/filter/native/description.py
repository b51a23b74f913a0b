"""Describe the arguments of a native function once: everything that depends on their names and order follows.

A `Description` names the tensors that a C source reads and writes. It fills the structs of the source's `forward` and
`backward`, states the schemas and allocates the results of both, and knows what to save for backward and which
gradient belongs to which argument.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from membydesign.filter.native import structs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor


@dataclass(eq=False)  # not frozen, which would make importing slower
class Input:
    """A tensor that an operator takes.

    Attributes:
        name: of the argument.
        field: of its value in the C struct `Inputs`, and of its gradient in `Gradients`.
        values: the fields of `Inputs` that are computed from it, where `Inputs` does not have the tensor itself.
        on_request: further such fields by the option that requests them; null in C where that is false.
        optional: whether it may be None.
        constant: whether it has no gradient. Such a tensor has no batch axis; all other tensors have it first.
        overwritten: whether C writes every entry of its gradient, which otherwise is zero at first.
    """

    name: str
    field: str
    values: Mapping[str, Callable[[Tensor], Tensor]] | None = None
    on_request: Mapping[str, Mapping[str, Callable[[Tensor], Tensor]]] = dataclasses.field(default_factory=dict)
    optional: bool = False
    constant: bool = False
    overwritten: bool = False


@dataclass(eq=False)  # not frozen, which would make importing slower
class Output:
    """A tensor that an operator returns.

    Attributes:
        name: of the result.
        field: of its value in the C struct `Outputs`, and of its gradient in `Gradients`.
        shape: the name of the input whose shape it has, or a function of all arguments.
        option: the argument that requests it; the result is empty, and null in C, where that is false.
        start: the input that C updates in place to get it. That input's gradient is likewise the output's, updated;
            its value is not saved for backward.
        saved: the field of `Gradients` in which backward reads its value, if it does.
        private: whether it serves backward alone, and has no gradient.
        symmetric: whether it consists of symmetric matrices, whose gradient may be symmetrised.
        null_gradient: whether C takes a null pointer for a gradient of zero.
    """

    name: str
    field: str
    shape: str | Callable[[Any], tuple[int, ...]]
    option: str | None = None
    start: str | None = None
    saved: str | None = None
    private: bool = False
    symmetric: bool = False
    null_gradient: bool = False


@dataclass(frozen=True, eq=False)
class Description:
    """A C source with the functions `forward(Inputs, Outputs)` and `backward(Inputs, Gradients)`.

    Attributes:
        name: of the torch operators.
        source: the C file, from the arguments.
        inputs: its tensors. The first has the axes [B,T,H,...].
        outputs: its results.
        numbers: the numbers in `Inputs`, from the arguments that backward has too.
        options: its other arguments, with their types. The last argument, `save`, says whether backward will follow.
    """

    name: str
    source: Callable[[Any], str]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    numbers: Callable[[Any], dict[str, Any]]
    options: Mapping[str, type] = dataclasses.field(default_factory=dict)

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """The names of forward's arguments, in order."""
        return (*(i.name for i in self.inputs), *self.options, "save")

    @cached_property
    def kept(self) -> tuple[Input, ...]:
        """The inputs whose values backward needs."""
        starts = {o.start for o in self.outputs}
        return tuple(i for i in self.inputs if i.name not in starts)

    @cached_property
    def saved(self) -> tuple[Output, ...]:
        """The outputs whose values backward needs."""
        return tuple(o for o in self.outputs if o.saved)

    @cached_property
    def public(self) -> tuple[Output, ...]:
        """The outputs that have gradients."""
        return tuple(o for o in self.outputs if not o.private)

    @cached_property
    def differentiable(self) -> tuple[Input, ...]:
        """The inputs that have gradients."""
        return tuple(i for i in self.inputs if not i.constant)

    @cached_property
    def arguments_back(self) -> tuple[str, ...]:
        """The names of backward's arguments, in order; d_… is the gradient of an output."""
        tensors = (*(i.name for i in self.kept), *(f"saved_{o.name}" for o in self.saved))
        return (*tensors, *self.options, *(f"d_{o.name}" for o in self.public))

    @property
    def schema(self) -> str:
        """Forward, as torch.library wants it."""
        tensors = [f"Tensor{'?' * i.optional} {i.name}" for i in self.inputs]
        return _schema([*tensors, *self._typed_options, "bool save"], len(self.outputs))

    @property
    def schema_back(self) -> str:
        """Backward, as torch.library wants it."""
        tensors = [f"Tensor{'?' * i.optional} {i.name}" for i in self.kept]
        tensors += [f"Tensor saved_{o.name}" for o in self.saved]
        gradients = [f"Tensor{'?' * (o.null_gradient or bool(o.option))} d_{o.name}" for o in self.public]
        return _schema([*tensors, *self._typed_options, *gradients], len(self.differentiable))

    @property
    def _typed_options(self) -> list[str]:
        return [f"{kind.__name__} {name}" for name, kind in self.options.items()]

    def empty_outputs(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Allocate the results of `forward`."""
        x = _named(self.arguments, arguments)
        return tuple([self._empty(o, x) for o in self.outputs])

    def _empty(self, o: Output, x: Any) -> Tensor:
        values = vars(x)
        new_empty = values[self.inputs[0].name].new_empty
        if o.option and not values[o.option]:
            return new_empty(0)
        return new_empty(values[o.shape].shape if isinstance(o.shape, str) else o.shape(x))

    def forward(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Run C's forward."""
        x = _named(self.arguments, arguments)
        values, results = vars(x), []
        fields: dict[str, Tensor | None] = {}
        for o in self.outputs:
            result = _copy(values[o.start]) if o.start else self._empty(o, x)
            results.append(result)
            fields[o.field] = None if o.option and not values[o.option] else result
        self._call("forward", "Outputs", x, fields)
        return tuple(results)

    def empty_gradients(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Allocate the results of `backward`."""
        values = vars(_named(self.arguments_back, arguments))
        like = [values[f"d_{o.name}" if o else i.name] for i, o in self._ends.items()]
        return tuple([like[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in like])

    @cached_property
    def _ends(self) -> dict[Input, Output | None]:
        """The differentiable inputs, and the output that each is the start of."""
        ends = {o.start: o for o in self.outputs}
        return {i: ends.get(i.name) for i in self.differentiable}

    def backward(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Run C's backward: a gradient for each differentiable input, empty for an absent one."""
        x = _named(self.arguments_back, arguments)
        values, results = vars(x), []
        fields: dict[str, Tensor | None] = {o.field: values[f"d_{o.name}"] for o in self.public}
        for i, end in self._ends.items():
            value = values[f"d_{end.name}" if end else i.name]
            if value is None:
                results.append(arguments[0].new_empty(0))
                fields[i.field] = None
                continue
            if end is None:
                result = (value.new_empty if i.overwritten else value.new_zeros)(value.shape)
            else:  # C turns the gradient of the end into that of the start
                result = _copy((value + value.mT) / 2 if end.symmetric else value)
            results.append(result)
            fields[i.field] = result
        for o in self.saved:
            assert o.saved is not None
            fields[o.saved] = values[f"saved_{o.name}"]
        self._call("backward", "Gradients", x, fields)
        return tuple(results)

    def remember(self, ctx: Any, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
        """Put into a context what `gradients` needs."""
        assert arguments[-1], "backward needs what forward saves"
        kept, saved, public = self._places
        ctx.options = arguments[len(self.inputs) : -1]
        ctx.shapes = [outputs[place].shape for place in public]
        ctx.save_for_backward(*[arguments[place] for place in kept], *[outputs[place] for place in saved])

    @cached_property
    def _places(self) -> tuple[tuple[int, ...], ...]:
        """The places of kept inputs among all inputs, and of saved and of public outputs among all outputs."""
        kept = tuple(self.inputs.index(i) for i in self.kept)
        return kept, *(tuple(self.outputs.index(o) for o in some) for some in (self.saved, self.public))

    def gradients(
        self, backward: Callable[..., tuple[Tensor, ...]], ctx: Any, grads: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """Call `backward` with a context and the gradients of outputs; return one gradient for each argument."""
        saved = ctx.saved_tensors  # once: activation checkpointing allows no more
        options = dict(zip(self.options, ctx.options, strict=True))
        d_outputs = [grads[place] for place in self._places[2]]
        for place, (o, shape) in enumerate(zip(self.public, ctx.shapes, strict=True)):
            if o.option and not options[o.option]:
                d_outputs[place] = None
            elif d_outputs[place] is None and not o.null_gradient:
                d_outputs[place] = saved[0].new_zeros(shape)
        results = backward(*saved, *ctx.options, *d_outputs)
        by_name: dict[str, Tensor | None] = {i.name: d for i, d in zip(self.differentiable, results, strict=True)}
        for i, value in zip(self.kept, saved, strict=False):
            if value is None:
                by_name[i.name] = None
        return tuple(map(by_name.get, self.arguments))

    def _fields(self, x: Any) -> dict[str, Tensor | float | None]:
        """The struct `Inputs`."""
        values, fields = vars(x), self.numbers(x)
        for i in self.kept:
            value = values[i.name]
            if i.values is None:
                fields[i.field] = value
            else:
                fields.update({name: None if value is None else f(value) for name, f in i.values.items()})
            for option, more in i.on_request.items():
                if value is None or not values[option]:
                    fields.update(dict.fromkeys(more))
                else:
                    fields.update({name: f(value) for name, f in more.items()})
        return fields

    def _call(self, name: str, struct: str, x: Any, values: Mapping[str, Tensor | None]) -> None:
        """Call a function of the source with `Inputs` and another struct of these values."""
        first = vars(x)[self.inputs[0].name]
        function = structs.function(self.source(x), first.dtype, name, ("Inputs", struct))
        function(first.shape[0] * first.shape[2], self._fields(x), values)


def _named(names: Sequence[str], values: Sequence[Any]) -> Any:
    arguments = SimpleNamespace()
    vars(arguments).update(zip(names, values, strict=True))
    return arguments


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _schema(arguments: list[str], results: int) -> str:
    return f"({', '.join(arguments)}) -> ({', '.join(['Tensor'] * results)})"
