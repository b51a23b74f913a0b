"""The operator of `triton.py` in torch, for where its kernels cannot be compiled or launched.

It takes the same arguments, returns the same results and saves the same tensors, so that either direction can run as a
kernel or here, whatever the other did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from membydesign.filter.torch.dense import Chunks, Noise, precision_of, read_chunks, run_pass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Passed(NamedTuple):
    """What can be differentiated, then what is saved: the order of `triton.forward`."""

    output: Tensor
    mean: Tensor
    covariance: Tensor
    precision: Tensor
    error: Tensor
    variance: Tensor
    observed: Tensor
    starts_M: Tensor
    starts_P: Tensor


def run(
    keys: Tensor,
    queries: Tensor,
    exits: Tensor,
    built_up: Tensor,
    cross: Tensor,
    write_noise: Tensor,
    values: Tensor,
    decay: Tensor,
    noise: Tensor,
    across: Tensor | None,
    angle: Tensor | None,
    mean: Tensor,
    covariance: Tensor,
) -> Passed:
    """Everything that `triton.forward` can return, differentiable; its docstring has the arguments."""
    built_up = built_up.tril()
    chunks = Chunks(
        keys=keys,
        own=(built_up + built_up.tril(-1).mT)[:, :, None] + torch.diag_embed(write_noise),
        exits=exits,
        values=values,
        decay=decay,
        noise=Noise(noise[..., None, :], None if across is None else across[..., None, :]).at_end(keys.shape[-1]),
        cos=None if angle is None else angle.cos(),
        sin=None if angle is None else angle.sin(),
    )
    M, P, M0, P0, factor, error, failed = run_pass(mean, covariance, chunks)
    reads = read_chunks(queries[:, :, None], keys[:, :, None], cross[:, :, None], M0, P0, factor, error)
    variance = (reads.reads * queries[:, :, None]).sum(-1) - reads.weights.square().sum(-1)
    observed = factor.detach().square().sum(-1)  # the diagonal of G
    return Passed(reads.output, M, P, precision_of(factor, failed), error, variance, observed, M0, P0)


def forward(
    *inputs: Tensor | None, with_variance: bool, with_error: bool, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the forward kernel finds and keeps.

    Args:
        inputs: as `run` takes them.
        with_variance: whether variances were asked for; else they are empty.
        with_error: whether errors were asked for, likewise.
        save: whether to keep the beliefs at all chunks' starts; else only the last.
    """
    with torch.no_grad():
        actual = run(*inputs)  # pyright: ignore[reportArgumentType]
    starts_M, starts_P = (x if save else x[:, :, :, :0] for x in (actual.starts_M, actual.starts_P))
    return actual._replace(
        error=actual.error if with_error else actual.error.new_empty(0),
        variance=actual.variance if with_variance else actual.variance.new_empty(0),
        starts_M=torch.cat((starts_M, actual.mean[:, :, :, None]), 3),
        starts_P=torch.cat((starts_P, actual.covariance[:, :, :, None]), 3),
    )


def backward(inputs: Sequence[Tensor | None], upstream: Sequence[Tensor | None], into: Sequence[Tensor]) -> None:
    """Run forward again, differentiate it, and write what the backward kernel would.

    Args:
        inputs: as `run` takes them.
        upstream: the gradients of output, mean, covariance, precision, error and variance; None where there is none.
        into: one tensor for each input. Those that noise groups share have an axis for them, of which the first group
            gets all; those of pairs of rows have an entry for each row, of which the first gets all.
    """
    # Inside a torch operator autograd sees nothing; leaving inference mode, which need not be on, lets it see again.
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
        actual = run(*leaves)  # pyright: ignore[reportArgumentType]
        pairs = [(y, g) for y, g in zip(actual[:6], upstream, strict=True) if g is not None]
        present = [x for x in leaves if x is not None]
        outputs, gradients = [y for y, _ in pairs], [g for _, g in pairs]
        gradients = iter(torch.autograd.grad(outputs, present, gradients, materialize_grads=True))
    for leaf, result in zip(leaves, into, strict=True):
        if leaf is None:
            continue
        gradient = next(gradients)
        if gradient.shape == result.shape:
            result.copy_(gradient)
            continue
        first = result.zero_()[:, :, 0]
        (first if gradient.shape == first.shape else first[..., 0::2]).copy_(gradient)
