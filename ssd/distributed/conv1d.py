"""The convolution on one rank's part of a sequence: its first tokens see the last ones of the parts before."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..runtime.custom_ops import differentiate_once, wants_gradient
from .exchange import INITIAL_STATES, GatherWithGradient, check_alike, find_place


def find_convolution_start(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, initial_states: Tensor | None,
    activation: str | None, group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor | None]:
    """x, to be convolved and used for nothing else; and the states that this rank's convolution starts from,
    (batch, dim, width - 1), whose gradient goes to the ranks that they are from.

    All arguments are checked, and those of `causal_conv1d_fn`.
    """
    rank, ranks = find_place(group)
    if torch.compiler.is_compiling():
        raise ValueError("context_group: got a group under torch.compile, expected a call outside of what is compiled")
    if ranks == 1:
        return x, initial_states
    (batch, dim, seqlen), held = x.shape, weight.shape[1] - 1
    check_alike(group, {
        "function": "causal_conv1d_fn", "device of x": x.device.type, "dtype of x": x.dtype, "batch": batch, "dim": dim,
        "width": held + 1, "dtype of weight": weight.dtype, "dtype of bias": None if bias is None else bias.dtype,
        "documents": None if seq_idx is None else "seq_idx", "activation": activation,
        INITIAL_STATES: rank > 0 and initial_states is not None,
        "a gradient of the inputs": wants_gradient((x, weight, bias, initial_states)),
        "a gradient of x or initial_states": wants_gradient((x, initial_states))})
    if initial_states is None:
        initial_states = x.new_zeros(batch, dim, held)
    # the last tokens of each part; rank 0 has what comes before its first, too, another rank of a short part has too few
    x, own = _TakeLast.apply(x, min(held, seqlen))
    last = torch.cat([initial_states.to(x.dtype), own], 2)[:, :, -held:]
    present = torch.arange(held, device=x.device) >= (max(held - seqlen, 0) if rank else 0)
    sent = [last, present]
    if seq_idx is not None:
        sent.append(torch.cat([seq_idx[:, :1].expand(batch, held), seq_idx], 1)[:, -held:].long())
    lasts, present, *documents = GatherWithGradient.apply(group, *sent)  # each [ranks, ...]
    if not rank:  # depends on what was gathered, if by nothing, so that the backward of every rank takes part in the exchange
        return x, torch.where(torch.zeros_like(present[0]), lasts[0].to(initial_states.dtype), initial_states)
    found = present[:rank].flatten().int().argsort(stable=True)[-held:]
    start = lasts[:rank].permute(1, 2, 0, 3).flatten(2)[:, :, found]
    if seq_idx is None:
        return x, start
    document = documents[0][:rank].transpose(0, 1).flatten(1)[:, found]
    return x, start.where((document == seq_idx[:, :1])[:, None], 0)


class _TakeLast(torch.autograd.Function):
    """(x, count) -> x and its last tokens. Their gradient is added to that of x in place, which the one use of x has made: a
    slice's gradient would be as large as x, and most of it zeros.
    """

    @staticmethod
    def forward(ctx, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.shape = x.shape
        return x.view_as(x), x[:, :, x.shape[2] - count :].clone()

    @staticmethod
    @differentiate_once
    def backward(ctx, grad: Tensor | None, last: Tensor | None) -> tuple[Tensor | None, None]:
        if last is not None:
            grad = last.new_zeros(ctx.shape) if grad is None else grad
            grad[:, :, grad.shape[2] - last.shape[2] :] += last
        return grad, None
