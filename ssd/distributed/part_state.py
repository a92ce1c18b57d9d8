"""What a part of a sequence does to the state that passes through it, without scanning it.

The state after a part is `decay * (the state before it) + end`, the gradient of the state before it is `decay * (that of the
state after it) + start`. Both sums over tokens, end and start, have one form,

    sum_t w_t u_t^T v_t,    end: u = x, v = B, w_t = dt_t exp(a_{t+1} + ... + a_last)
                            start: u = dy, v = C, w_t = exp(a_0 + ... + a_t)

so kernel chunk_state takes either, with the weights in the place of dt, no decay of its own, and long segments of the part in
the place of chunks: what it writes is small beside what it reads.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference_stages as stages
from ..baseline.kernels.chunk_state import chunk_state
from ..kernels.arguments import fitted
from ..kernels.chunk_cumsum import chunk_cumsum
from ..types import Options, SSDInputs

_PROGRAMS = 2048  # that fill any GPU with segments, while their states stay few
_OFFSETS = 2**31  # of a segment's elements, in the kernel


class Decays:
    """The decays of a part.

    Attributes:
        dt: (batch, nheads, tokens) fp32 (fp64 for fp64 x), the step; tokens are padded to whole chunks.
        total: (batch, nheads), exp of the sum of all dt A.
    """

    def __init__(self, i: SSDInputs, in_torch: bool):
        if in_torch:
            compute = torch.float64 if i.x.dtype == torch.float64 else torch.float32
            dt, A, dt_bias = (None if t is None else t.to(compute) for t in (i.dt, i.A, i.dt_bias))
            dt, dA_cumsum = stages.chunk_cumsum(dt, A, i.chunk_size, dt_bias, i.dt_softplus, i.dt_limit)
        else:
            with torch.cuda.device_of(i.x):
                dt, dA_cumsum = chunk_cumsum(i)
        self._inputs, self._in_torch, self._dA_cumsum = i, in_torch, dA_cumsum
        self.dt, self._chunks = dt.flatten(2), dA_cumsum[..., -1]
        self.total = self._chunks.sum(-1).exp()

    def weigh_to_end(self) -> Tensor:
        """w of `end`, (batch, nheads, tokens). Summed from the end, so that what counts most is rounded least."""
        after = F.pad(_sum_up(self._chunks[..., 1:].flip(-1)).flip(-1), (0, 1))
        return self.dt * self._exp(self._chunks[..., None] - self._dA_cumsum, after)

    def weigh_from_start(self) -> Tensor:
        """w of `start`, (batch, nheads, tokens)."""
        return self._exp(self._dA_cumsum, F.pad(_sum_up(self._chunks[..., :-1]), (1, 0)))

    def sum_outer(self, u: Tensor, v: Tensor, weights: Tensor, kept: Tensor | None, options: Options) -> Tensor:
        """sum_t w_t u_t^T v_t, (batch, nheads, headdim, dstate), in the dtype of dt.

        u: (batch, seqlen, nheads, headdim). v: (batch, seqlen, ngroups, dstate). kept: (batch, seqlen) bool, the tokens that
        count; all unless given.
        """
        i = self._inputs
        if kept is not None:
            weights = weights * F.pad(kept, (0, weights.shape[-1] - i.seqlen))[:, None]
        if self._in_torch:
            weighted = u.to(weights.dtype) * weights[..., : i.seqlen].transpose(1, 2)[..., None]
            weighted, v = weighted.to(u.dtype).to(weights.dtype), v.to(weights.dtype)
            return torch.einsum("blgrp,blgn->bgrpn", weighted.unflatten(2, (i.ngroups, -1)), v).flatten(1, 2)
        u, v = fitted(u), fitted(v)
        segment = _choose_segment(i, u, v)
        weights = F.pad(weights, (0, -weights.shape[-1] % segment)).contiguous()
        segments = replace(i, x=u, B=v, seq_idx=None, chunk_size=segment)
        with torch.cuda.device_of(u):
            return chunk_state(segments, weights, torch.zeros_like(weights), options).sum(1)

    @staticmethod
    def _exp(of_chunk: Tensor, others: Tensor) -> Tensor:
        """exp of sums that are at most 0 but for rounding."""
        return (of_chunk + others[..., None]).clamp(max=0).exp().flatten(2)


def _sum_up(t: Tensor) -> Tensor:
    """Cumulative sums along the last axis; the same bits each time, which torch.cumsum on a GPU does not promise."""
    shift = 1
    while shift < t.shape[-1]:
        t = t + F.pad(t[..., :-shift], (shift, 0))
        shift *= 2
    return t


def _choose_segment(i: SSDInputs, *read: Tensor) -> int:
    """Tokens of a segment, a power of two, at least a chunk."""
    segment = i.chunk_size
    most = _OFFSETS // max(1, *(t.stride(1) + t.stride(3) for t in read))
    while segment < i.seqlen and 2 * segment <= most and i.batch * i.nheads * i.seqlen >= 2 * segment * _PROGRAMS:
        segment *= 2
    return segment
