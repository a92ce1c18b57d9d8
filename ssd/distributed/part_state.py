"""What a part of a sequence does to the state that passes through it, without scanning it.

The state after a part is `decay * (the state before it) + end`; the gradient of the state before it is `decay * (that of the
state after it) + start`. In both sums tokens t of the part count whose document goes on to its end, or from its start:

    end = sum_t exp(a_{t+1} + ... + a_last) dt_t x_t^T B_t,    start = sum_t exp(a_0 + ... + a_t) dy_t^T C_t

They are (7) and (13) of docs/ssd.md for one long chunk, so kernels chunk_state and chunk_scan_dstates compute them, in segments
of so many tokens that what they write is small beside what they read.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference_stages as stages
from ..baseline.kernels.chunk_scan_dstates import chunk_scan_dstates
from ..baseline.kernels.chunk_state import chunk_state
from ..kernels.arguments import fit_to_tiles
from ..kernels.chunk_cumsum import chunk_cumsum
from ..types import Options, SSDInputs

_PROGRAMS = 2048  # that fill any GPU with segments, while their states stay few
_OFFSETS = 2**31  # that kernels count elements of a segment by


def compute_end(i: SSDInputs, in_torch: bool, options: Options) -> tuple[Tensor, Tensor]:
    """end, (batch, nheads, headdim, dstate); and decay, (batch, nheads), as if no document began. fp32, fp64 for fp64 x."""
    dt, dA_cumsum = _accumulate(i, in_torch)
    chunks, last = dA_cumsum[..., -1], None if i.seq_idx is None else i.seq_idx[:, -1:]
    # minus what is added up after a token. Added up from the end: what counts most is rounded least
    after = F.pad(_sum_up(chunks[..., 1:].flip(-1)).flip(-1), (0, 1))
    rest, dt = (dA_cumsum - (chunks + after)[..., None]).flatten(2), dt.flatten(2)
    decay = chunks.sum(-1).exp()
    if in_torch:
        return _sum_outer(i.x, dt * rest.clamp(min=0).neg().exp(), None if last is None else i.seq_idx == last, i.B), decay
    i = replace(i, x=fit_to_tiles(i.x), B=fit_to_tiles(i.B))
    i = replace(i, chunk_size=_choose_segment(i, i.x, i.B))
    dt, rest = _pad(dt, i), _pad(rest, i)
    with torch.cuda.device_of(i.x):
        states = chunk_state(i, dt, rest, options)  # of each segment, at its end
    weights = rest[..., i.chunk_size - 1 :: i.chunk_size].clamp(min=0).neg().exp().transpose(1, 2)  # [batch, segments, nheads]
    if last is not None:
        at_ends = torch.cat([i.seq_idx[:, i.chunk_size - 1 : -1 : i.chunk_size], last], 1)
        weights = weights * (at_ends == last)[..., None]
    return (states * weights[..., None, None]).sum(1), decay


def compute_start(i: SSDInputs, dy: Tensor, in_torch: bool, options: Options) -> Tensor:
    """start, (batch, nheads, headdim, dstate) fp32 (fp64 for fp64 x), of dy, (batch, seqlen, nheads, headdim).

    i: seq_idx is 0 in the document that the part goes on with. Of x only shape and dtype are read.
    """
    _, dA_cumsum = _accumulate(i, in_torch)
    upto = (dA_cumsum + F.pad(_sum_up(dA_cumsum[..., :-1, -1]), (1, 0))[..., None]).flatten(2)
    if in_torch:
        return _sum_outer(dy, upto.clamp(max=0).exp(), None if i.seq_idx is None else i.seq_idx == 0, i.C)
    dy, i = fit_to_tiles(dy), replace(i, C=fit_to_tiles(i.C))
    i = replace(i, chunk_size=_choose_segment(i, dy, i.C))
    with torch.cuda.device_of(dy):
        starts = chunk_scan_dstates(i, dy, _pad(upto, i), options)  # of each segment, at the part's start
    if i.seq_idx is not None:  # a segment's first document is the one before it
        before = F.pad(i.seq_idx[:, i.chunk_size - 1 : -1 : i.chunk_size], (1, 0))
        starts = starts * (before == 0)[..., None, None, None]
    return starts.sum(1)


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


def _choose_segment(i: SSDInputs, *read: Tensor) -> int:
    """Tokens of a segment: chunk_size times a power of two."""
    segment = i.chunk_size
    most = _OFFSETS // max(t.stride(1) + t.stride(3) for t in read)
    while segment < i.seqlen and 2 * segment <= most and i.batch * i.nheads * i.seqlen >= 2 * segment * _PROGRAMS:
        segment *= 2
    return segment


def _pad(t: Tensor, i: SSDInputs) -> Tensor:
    """(batch, nheads, tokens) with zeros up to whole chunks of i."""
    missing = i.nchunks * i.chunk_size - t.shape[-1]
    return F.pad(t, (0, missing)) if missing else t
