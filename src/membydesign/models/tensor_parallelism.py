"""Tensor parallelism: the heads of every `MemoryLayer`, and the hidden units of every SwiGLU, split over processes.

Queries, keys, values, gates and step parameters are projected for the heads of each process, which filters them by
itself; only the last projection adds up over processes. Everything else is replicated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from membydesign.layers import MemoryLayer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from membydesign.models.modeling import MemoryForCausalLM, MemoryModel


class _Distributed(ParallelStyle):
    """Parameters with one placement; inputs that every process has, and outputs as they are or as plain tensors."""

    def __init__(self, placement: Shard | Replicate, *, local_output: bool) -> None:
        super().__init__()
        self.placement, self.local_output = placement, local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Distribute a module, and convert what goes into it and what comes out."""
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(parameter, device_mesh, [self.placement])
            module.register_parameter(name, nn.Parameter(whole, parameter.requires_grad))

        def enter(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(
                DTensor.from_local(x, device_mesh, [Replicate()], run_check=False)
                if isinstance(x, Tensor) and not isinstance(x, DTensor)
                else x
                for x in inputs
            )

        def leave(_: nn.Module, inputs: Any, output: Any) -> Any:
            del inputs
            return output.redistribute(placements=[Replicate()]).to_local() if isinstance(output, DTensor) else output

        module.register_forward_pre_hook(enter)
        if self.local_output:
            module.register_forward_hook(leave)
        return module


def tensor_parallel_plan(model: MemoryForCausalLM | MemoryModel) -> dict[str, ParallelStyle]:
    """Return the plan of a model for `torch.distributed.tensor.parallel.parallelize_module`.

    Heads of `MemoryLayer`s and hidden units are split; all other modules, other kinds of layers among them, are
    replicated. `tensor_parallel` applies it, and also ties weights again that a model ties.
    """
    from membydesign.models.modeling import SwiGLU

    plan: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        if isinstance(module, MemoryLayer):
            plan.update({f"{name}.{part}": style for part, style in _layer_plan(module).items()})
        elif isinstance(module, SwiGLU):
            plan |= {f"{name}.gate_proj": ColwiseParallel(), f"{name}.up_proj": ColwiseParallel()}
            plan[f"{name}.down_proj"] = RowwiseParallel()
    for name, module in model.named_modules():
        if name and name not in plan and any(True for _ in module.parameters(recurse=False)):
            plan[name] = _Distributed(Replicate(), local_output=True)
    return plan


def _layer_plan(layer: MemoryLayer) -> dict[str, ParallelStyle]:
    """The plan of one layer."""
    plan: dict[str, ParallelStyle] = {}
    for name, module in layer.named_modules():
        if name in ("q_proj", "k_proj", "v_proj", "g_proj"):
            plan[name] = ColwiseParallel(use_local_output=False)
        elif name == "o_proj":
            plan[name] = RowwiseParallel()
        elif name == "o_norm":  # whose weight all heads share
            plan[name] = _Distributed(Replicate(), local_output=False)
        elif any(
            True for _ in module.parameters(recurse=False)
        ):  # drift, noises, convolutions: heads or channels first
            plan[name] = _Distributed(Shard(0), local_output=False)
    return plan


def tensor_parallel(model: MemoryForCausalLM, mesh: DeviceMesh) -> MemoryForCausalLM:
    """Split a model over the processes of a mesh, in place.

    Args:
        model: the same in every process.
        mesh: one axis, over which heads are split; their number must be divisible by its size.

    Returns:
        The model. Its parameters are DTensors; every process passes the same batch and gets the same loss and logits.

    In every process that torchrun started:

        mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (2,))
        model = tensor_parallel(MemoryForCausalLM(config), mesh)
    """
    if mesh.ndim != 1:
        raise ValueError(f"mesh: expected one axis (such as mesh['tensor']), got {mesh.ndim}")
    for name, module in model.named_modules():
        if isinstance(module, MemoryLayer) and (module.num_heads % mesh.size() or module.num_key_heads % mesh.size()):
            raise ValueError(
                f"mesh: expected a divisor of the {module.num_heads} heads of {name}, got {mesh.size()} processes"
            )
    parallelize_module(model, mesh, tensor_parallel_plan(model))
    model.tie_weights()
    return model
