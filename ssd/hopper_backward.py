"""The backward on Hopper, which `fused` and `persistent` take where the inputs allow:

    chunk_cumsum, hopper_states forwards for the states and backwards for their gradients (twice where sequences are cut),
    hopper_group, chunk_cumsum_bwd; with a gate chunk_scan_dz before them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from .hopper import BLOCK_M, cannot_run, dealt, describable, describe, describe_states, say_plain
from .kernels.chunk_cumsum import chunk_cumsum
from .kernels.chunk_cumsum_bwd import chunk_cumsum_bwd
from .kernels.chunk_scan_dz import chunk_scan_dz
from .tuning import current_device
from .types import Options, SSDGrads, SSDInputs, SSDSaved

# What a tile costs beside its heads, in the time of one of them; and what more if its sums are one of several parts.
_TILE, _PART = 1.5, 3.5


def can_run(i: SSDInputs, options: Options, variant: str) -> bool:
    """Whether these kernels take the inputs for `variant`; that they do not is said to the logger, once for each reason."""
    reason = cannot_run(replace(i, z=None), options, by_chunk=False) if options.gluon else "options.gluon is off"
    if reason:
        say_plain(f"{variant} (backward)", reason)
    return reason is None


def backward(saved: SSDSaved, dout: Tensor, dfinal_states: Tensor | None, into: SSDGrads) -> SSDGrads:
    """As `Variant.backward`, from the inputs alone: states that the forward kept are not read."""
    from .kernels.hopper_group import hopper_group
    from .kernels.hopper_states import all_states, piece_states

    i, options = saved.inputs, saved.options
    with torch.cuda.device_of(i.x):
        sms = current_device(i.x.device.index).sms
        dz, dy = (None, dout) if i.z is None else chunk_scan_dz(i, dout, saved.y, into.dz)
        dy = dy if describable(dy) else dy.contiguous()
        spans = replace(i, chunk_size=BLOCK_M)
        dt, dA_cumsum = chunk_cumsum(spans)
        tokens = tuple(map(describe, (i.x, i.B, dy, i.C)))

        states = torch.empty(2, i.batch, spans.nchunks, i.nheads, i.headdim, i.dstate, device=dt.device, dtype=i.x.dtype)
        starts, final_states = _starts(i, dfinal_states), None
        if i.initial_states is not None:
            final_states = torch.empty_like(starts)
        runs, piece_runs, npieces = dealt(2 * i.batch, i.nheads // 2, spans.nchunks, options.segments, i.x.device)
        pieces = piece_states(i, tokens, dt, dA_cumsum, npieces, piece_runs) if npieces else (None, None)
        states_desc = describe_states(states)
        all_states(i, tokens, states_desc, dt, dA_cumsum, runs, starts, *pieces, final_states, BLOCK_M)

        dx = into.dx if into.dx is not None and describable(into.dx) else torch.empty_like(i.x, memory_format=torch.contiguous_format)
        splits = _splits(i.batch * spans.nchunks * i.ngroups, i.nheads // i.ngroups, sms)
        parts = [torch.empty(splits, *t.shape, device=dt.device, dtype=t.dtype if splits == 1 else torch.float32)
                 for t in (i.B, i.C)]
        x_desc, B_desc, dy_desc, C_desc = tokens
        sums, s = hopper_group(i, x_desc, dy_desc, B_desc, C_desc, states_desc, describe(dx), dt, dA_cumsum, *parts, sms)
        dB, dC = (part[0] if splits == 1 else part.sum(0).to(i.B.dtype) for part in parts)
        no_parts = sums.new_empty(0, *dt.shape)  # of r, which is in row
        ddt, dA, ddt_bias = chunk_cumsum_bwd(spans, sums[0], no_parts, sums[1], s[..., None], sums[2], sums[3:4], into.ddt)
        dD = None if i.D is None else sums[4].sum((0, 2, 3))
    dinitial_states = None if final_states is None else _left(final_states[i.batch :], into.dinitial_states)
    return SSDGrads(_left(dx, into.dx), ddt, dA, _left(dB, into.dB), _left(dC, into.dC), dD, dz, ddt_bias, dinitial_states)


def _starts(i: SSDInputs, dfinal_states: Tensor | None) -> Tensor | None:
    """(2 batch, nheads, headdim, dstate) fp32: where the walks forwards and backwards begin; None if all at zero."""
    if i.initial_states is None and dfinal_states is None:
        return None
    starts = torch.zeros(2, i.batch, i.nheads, i.headdim, i.dstate, device=i.x.device, dtype=torch.float32)
    for start, given in zip(starts, (i.initial_states, dfinal_states), strict=True):
        if given is not None:
            start.copy_(given)
    return starts.flatten(0, 1)


def _left(gradient: Tensor, into: Tensor | None) -> Tensor:
    """The gradient where it was asked to be."""
    return gradient if into is None or into is gradient else into.copy_(gradient)


@cache
def _splits(tiles: int, heads: int, blocks: int) -> int:
    """Into how many parts the heads of a group are cut so that the last block is done soonest. No part is empty."""

    def time(splits: int) -> float:
        each = heads if splits == 1 else -(-heads // splits) + _PART
        return -(-tiles * splits // blocks) * (each + _TILE)

    best = min(range(1, min(heads, 16) + 1), key=time)
    return -(-heads // -(-heads // best))
