"""What a part of a sequence does to the state that passes through it, without scanning it.

The state after a part is `decay * (the state before it) + end`; the gradient of the state before it is `decay * (that of the
state after it) + start`. In both sums tokens t of the part count whose document goes on to its end, or from its start:

    end = sum_t exp(a_{t+1} + ... + a_last) dt_t x_t^T B_t,    start = sum_t exp(a_0 + ... + a_t) dy_t^T C_t

On a GPU the kernel part_sum adds them up.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference_stages as stages
from ..kernels.arguments import fit_to_tiles
from ..kernels.chunk_cumsum import chunk_cumsum
from ..types import Options, SSDInputs
from .exchange import Message
from .kernels.part_sum import part_sum


def compute_end(i: SSDInputs, in_torch: bool, options: Options, *others: tuple[tuple[int, ...], torch.dtype],
                make: Callable[..., Message] = Message) -> Message:
    """A message of end, (batch, nheads, headdim, dstate); decay, (batch, nheads), as if no document began; and others, of these
    shapes and dtypes, still to be written. end and decay are fp32, fp64 for fp64 x. make: the kind of message.
    """
    dt, dA_cumsum = _accumulate(i, in_torch)
    message = make(i.x.device, (_get_shape(i), dt.dtype), ((i.batch, i.nheads), dt.dtype), *others)
    end, decay = message.tensors[:2]
    if not in_torch:
        with torch.cuda.device_of(i.x):
            part_sum(i, fit_to_tiles(i.x), fit_to_tiles(i.B), dt, dA_cumsum, end, decay, options)
        return message
    chunks = dA_cumsum[..., -1]
    decay.copy_(chunks.sum(-1).exp())
    # minus what is added up after a token. Added up from the end: what counts most is rounded least
    after = F.pad(_sum_up(chunks[..., 1:].flip(-1)).flip(-1), (0, 1))
    rest = (dA_cumsum - (chunks + after)[..., None]).flatten(2)
    weights = dt.flatten(2) * rest.clamp(min=0).neg().exp()
    end.copy_(_sum_outer(i.x, weights, None if i.seq_idx is None else i.seq_idx == i.seq_idx[:, -1:], i.B))
    return message


def compute_start(i: SSDInputs, dy: Tensor, in_torch: bool, options: Options) -> Message:
    """A message of start, (batch, nheads, headdim, dstate) fp32 (fp64 for fp64 x), of dy, (batch, seqlen, nheads, headdim).

    i: seq_idx is 0 in the document that the part goes on with. Of x only shape and dtype are read.
    """
    dt, dA_cumsum = _accumulate(i, in_torch)
    message = Message(dy.device, (_get_shape(i), dt.dtype))
    (start,) = message.tensors
    if not in_torch:
        with torch.cuda.device_of(dy):
            part_sum(i, fit_to_tiles(dy), fit_to_tiles(i.C), dt, dA_cumsum, start, None, options)
        return message
    upto = (dA_cumsum + F.pad(_sum_up(dA_cumsum[..., :-1, -1]), (1, 0))[..., None]).flatten(2)
    start.copy_(_sum_outer(dy, upto.clamp(max=0).exp(), None if i.seq_idx is None else i.seq_idx == 0, i.C))
    return message


def _get_shape(i: SSDInputs) -> tuple[int, ...]:
    return i.batch, i.nheads, i.headdim, i.dstate


def _accumulate(i: SSDInputs, in_torch: bool) -> tuple[Tensor, Tensor]:
    """dt and dA_cumsum, both (batch, nheads, nchunks, chunk_size)."""
    if not in_torch:
        with torch.cuda.device_of(i.x):
            return chunk_cumsum(i)
    compute = torch.float64 if i.x.dtype == torch.float64 else torch.float32
    dt, A, dt_bias = (None if t is None else t.to(compute) for t in (i.dt, i.A, i.dt_bias))
    return stages.chunk_cumsum(dt, A, i.chunk_size, dt_bias, i.dt_softplus, i.dt_limit)


def _sum_outer(u: Tensor, weights: Tensor, kept: Tensor | None, v: Tensor) -> Tensor:
    """sum_t w_t u_t^T v_t over the tokens that are kept, with the kernels' rounding; weights are padded to whole chunks."""
    weights = weights[..., : u.shape[1]].transpose(1, 2)  # [batch, seqlen, nheads]
    if kept is not None:
        weights = weights * kept[..., None]
    weighted = (u.to(weights.dtype) * weights[..., None]).to(u.dtype).to(weights.dtype).unflatten(2, (v.shape[2], -1))
    with torch.autocast(u.device.type, enabled=False):  # which would round where the kernels do not
        return torch.einsum("blgrp,blgn->bgrpn", weighted, v.to(weights.dtype)).flatten(1, 2)


def _sum_up(t: Tensor) -> Tensor:
    """Cumulative sums along the last axis; the same bits each time, which torch.cumsum on a GPU does not promise."""
    shift = 1
    while shift < t.shape[-1]:
        t = t + F.pad(t[..., :-shift], (shift, 0))
        shift *= 2
    return t
