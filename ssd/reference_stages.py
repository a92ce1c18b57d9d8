"""Every stage of the chunked operator in torch, forward and backward: what each kernel is tested against.

Shapes, throughout: dt, dA_cumsum (batch, nheads, nchunks, chunk_size); states (batch, nchunks, nheads, headdim, dstate);
CB (batch, nchunks, ngroups, chunk_size, chunk_size); tokens, cut into chunks, (batch, nchunks, chunk_size, nheads, headdim)
or (batch, nchunks, chunk_size, ngroups, dstate), zero past the end of the sequence. Equation numbers are those of docs/ssd.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .types import LEAST_Z


@dataclass(frozen=True)
class Precision:
    """Where a chunked form rounds (docs/ssd.md, section 4).

    Attributes:
        compute: dtype of every accumulation and decay factor.
        operand: dtype that the operands of matrix products are rounded to; None: not rounded.
    """

    compute: torch.dtype
    operand: torch.dtype | None = None

    def __call__(self, t: Tensor) -> Tensor:
        return t.to(self.compute)

    def round(self, t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """t with the accuracy of `dtype` (the operand dtype unless given), in the compute dtype."""
        dtype = dtype or self.operand
        return t if self.operand is None else t.to(dtype).to(self.compute)


@dataclass(frozen=True)
class Masks:
    """m(., .) of docs/ssd.md as 0 and 1: which tokens reach each other inside their documents."""

    pair: Tensor  # (batch, 1, nchunks, i, j): j <= i, one document
    prev: Tensor  # (batch, 1, nchunks, i): i belongs to the document of the token before the chunk
    last: Tensor  # (batch, 1, nchunks, j): j belongs to the document of the chunk's last token
    carry: Tensor  # (batch, nchunks): the document before the chunk is the one at its end

    @staticmethod
    def of(seq_idx: Tensor | None, batch: int, seqlen: int, chunk_size: int, dtype: torch.dtype, device) -> Masks:
        if seq_idx is None:
            seq_idx = torch.zeros(batch, seqlen, dtype=torch.int32, device=device)
        document = into_chunks(seq_idx, chunk_size, pad_mode="replicate")[:, None]  # [b, 1, c, q]
        last = document[..., -1:]
        prev = F.pad(last, (0, 0, 1, 0))[:, :, :-1]
        causal = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=device).tril()
        pair = causal & (document[..., :, None] == document[..., None, :])
        return Masks(pair.to(dtype), (document == prev).to(dtype), (document == last).to(dtype),
                     (last == prev)[:, 0, :, 0].to(dtype))


def into_chunks(t: Tensor, chunk_size: int, pad_mode: str = "zeros") -> Tensor:
    """(batch, seqlen, ...) -> (batch, nchunks, chunk_size, ...), padded with zeros or with the last token."""
    missing = -t.shape[1] % chunk_size
    if missing:
        tail = t[:, -1:].expand(-1, missing, *t.shape[2:])
        t = torch.cat([t, tail if pad_mode == "replicate" else torch.zeros_like(tail)], 1)
    return t.unflatten(1, (-1, chunk_size))


def _split_groups(t: Tensor, ngroups: int, axis: int) -> Tensor:
    """Splits the head axis into (ngroups, heads per group): head h belongs to group h // (nheads / ngroups)."""
    return t.unflatten(axis, (ngroups, -1))


def _reshape_factor(t: Tensor) -> Tensor:
    """(batch, nheads, nchunks, chunk_size) as a factor of (batch, nchunks, chunk_size, nheads, headdim)."""
    return t.permute(0, 2, 3, 1)[..., None]


def _compute_pair_decay(dA_cumsum: Tensor, masks: Masks) -> Tensor:
    """m(j, i) exp(A_i - A_j), causal: (batch, nheads, nchunks, i, j)."""
    return (dA_cumsum[..., :, None] - dA_cumsum[..., None, :]).clamp(max=0).exp() * masks.pair


def _decay_to_end(dA_cumsum: Tensor, masks: Masks) -> Tensor:
    """m(j, last) exp(A_last - A_j): (batch, nheads, nchunks, j)."""
    return (dA_cumsum[..., -1:] - dA_cumsum).clamp(max=0).exp() * masks.last


def _decay_from_start(dA_cumsum: Tensor, masks: Masks) -> Tensor:
    """m(prev, i) exp(A_i): (batch, nheads, nchunks, i)."""
    return dA_cumsum.exp() * masks.prev


def _decay_through(dA_cumsum: Tensor, masks: Masks) -> Tensor:
    """m(prev, last) exp(A_last): (batch, nchunks, nheads, 1, 1)."""
    return (dA_cumsum[..., -1].exp().transpose(1, 2) * masks.carry[..., None])[..., None, None]


def step(dt, dt_bias, dt_softplus, dt_limit) -> Tensor:
    """(1): the step of each token, shaped as dt."""
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = F.softplus(dt)
    return dt.clamp(*dt_limit)


def chunk_cumsum(dt, A, chunk_size, dt_bias, dt_softplus, dt_limit) -> tuple[Tensor, Tensor]:
    """(1), (6): the step and the cumulative decay. dt (batch, seqlen, nheads) and A in the compute dtype."""
    dt = into_chunks(step(dt, dt_bias, dt_softplus, dt_limit), chunk_size).permute(0, 3, 1, 2)
    return dt, (dt * A[:, None, None]).cumsum(-1)


def chunk_state(x, B, dt, dA_cumsum, masks, precision) -> Tensor:
    """(7): what a chunk alone adds to the state."""
    weighted = precision.round(x * _reshape_factor(dt * _decay_to_end(dA_cumsum, masks)))
    return torch.einsum("bcjgrp,bcjgn->bcgrpn", _split_groups(weighted, B.shape[3], 3), B).flatten(2, 3)


def state_passing(states, dA_cumsum, initial_states, masks) -> tuple[Tensor, Tensor]:
    """(8): the state before each chunk, and the one after the last."""
    carried = _decay_through(dA_cumsum, masks)
    state = torch.zeros_like(states[:, 0]) if initial_states is None else initial_states
    before = []
    for c in range(states.shape[1]):
        before.append(state)
        state = carried[:, c] * state + states[:, c]
    return torch.stack(before, 1), state


def bmm_chunk(C, B) -> Tensor:
    """(9)."""
    return torch.einsum("bcign,bcjgn->bcgij", C, B)


def chunk_scan(CB, x, dt, dA_cumsum, C, prev_states, D, masks, precision) -> Tensor:
    """(10). D (nheads, headdim or 1) or None."""
    g = C.shape[3]
    decay = _split_groups(_compute_pair_decay(dA_cumsum, masks) * dt[..., None, :], g, 1)
    weights = precision.round(CB.transpose(1, 2)[:, :, None] * decay)
    y = torch.einsum("bgrcij,bcjgrp->bcigrp", weights, _split_groups(x, g, 3)).flatten(3, 4)
    carried = torch.einsum("bcign,bcgrpn->bcigrp", C, _split_groups(prev_states, g, 2)).flatten(3, 4)
    y = y + carried * _reshape_factor(_decay_from_start(dA_cumsum, masks))
    return y if D is None else y + D * x


def chunk_scan_dz(dout, y, z) -> tuple[Tensor, Tensor]:
    """(12): dz, dy."""
    s = z.sigmoid()
    return dout * y * s * (1 + z * (1 - s)), dout * gate(z)


def gate(z) -> Tensor:
    """silu(z), as `SSDSaved.out` has it, with the derivative of silu at z = 0, too."""
    return F.silu(z + (torch.copysign(z.abs().clamp(min=LEAST_Z), z) - z).detach())


def find_y(out, z) -> Tensor:
    """The output before the gate; 0 where the gate has nothing left of it."""
    by = gate(z)
    return torch.where(by == 0, 0.0, out / by)


def chunk_scan_dstates(dy, C, dA_cumsum, masks, precision) -> Tensor:
    """(13)."""
    weighted = precision.round(dy * _reshape_factor(_decay_from_start(dA_cumsum, masks)))
    return torch.einsum("bcigrp,bcign->bcgrpn", _split_groups(weighted, C.shape[3], 3), C).flatten(2, 3)


def state_passing_bwd(dprev_states, prev_states, dA_cumsum, dfinal_states, masks) -> tuple[Tensor, Tensor, Tensor]:
    """(14), (22): dstates, dinitial_states, and s (batch, nheads, nchunks)."""
    carried = _decay_through(dA_cumsum, masks)
    grad = torch.zeros_like(dprev_states[:, 0]) if dfinal_states is None else dfinal_states
    after = []
    for c in reversed(range(dprev_states.shape[1])):
        after.append(grad)
        grad = carried[:, c] * grad + dprev_states[:, c]
    dstates = torch.stack(after[::-1], 1)
    return dstates, grad, (carried * prev_states * dstates).sum((-1, -2)).transpose(1, 2)


def chunk_scan_chunk_state_dx(CB, x, dt, dA_cumsum, B, dstates, dy, D, masks, precision):
    """(18), (19), (21): dx, (u + v) . x and q (batch, nheads, nchunks, chunk_size), dD (nheads, headdim)."""
    g = B.shape[3]
    weights = precision.round(CB.transpose(1, 2)[:, :, None] * _split_groups(_compute_pair_decay(dA_cumsum, masks), g, 1))
    u = torch.einsum("bgrcij,bcigrp->bcjgrp", weights, _split_groups(dy, g, 3)).flatten(3, 4)
    v = torch.einsum("bcjgn,bcgrpn->bcjgrp", B, _split_groups(dstates, g, 2)).flatten(3, 4)
    v = v * _reshape_factor(_decay_to_end(dA_cumsum, masks))
    dx = (u + v) * _reshape_factor(dt)
    if D is not None:
        dx = dx + D * dy
    ddt = ((u + v) * x).sum(-1).permute(0, 3, 1, 2)
    q = dt * (v * x).sum(-1).permute(0, 3, 1, 2)
    return dx, ddt, q, (dy * x).sum((0, 1, 2))


def chunk_state_dB(x, dt, dA_cumsum, dstates, ngroups, masks, precision) -> Tensor:
    """(17), first sum."""
    weighted = precision.round(x * _reshape_factor(dt * _decay_to_end(dA_cumsum, masks)))
    return torch.einsum("bcjgrp,bcgrpn->bcjgn", _split_groups(weighted, ngroups, 3), _split_groups(dstates, ngroups, 2))


def chunk_scan_dC(dy, dA_cumsum, C, prev_states, masks, precision) -> tuple[Tensor, Tensor]:
    """(16), first sum, and r of (20), (batch, nheads, nchunks, chunk_size)."""
    g = C.shape[3]
    weighted = _split_groups(precision.round(dy * _reshape_factor(_decay_from_start(dA_cumsum, masks))), g, 3)
    per_head = torch.einsum("bcigrp,bcgrpn->bcigrn", weighted, _split_groups(prev_states, g, 2))
    r = (per_head * C[:, :, :, :, None]).sum(-1).flatten(3, 4).permute(0, 3, 1, 2)
    return per_head.sum(4), r


def _pair_grads(x, dt, dA_cumsum, dy, masks) -> Tensor:
    """K of (15): (batch, nheads, nchunks, i, j)."""
    return torch.einsum("bcihp,bcjhp->bhcij", dy, x) * _compute_pair_decay(dA_cumsum, masks) * dt[..., None, :]


def chunk_scan_dCB(x, dt, dA_cumsum, dy, ngroups, masks) -> Tensor:
    """(15)."""
    return _split_groups(_pair_grads(x, dt, dA_cumsum, dy, masks), ngroups, 1).sum(2).transpose(1, 2)


def bmm_bwd(dCB, B, C) -> tuple[Tensor, Tensor]:
    """(16), (17), second sums: what dCB adds to dB and to dC."""
    return torch.einsum("bcgij,bcign->bcjgn", dCB, C), torch.einsum("bcgij,bcjgn->bcign", dCB, B)


def sum_pairs(x, dt, dA_cumsum, dy, CB, masks) -> tuple[Tensor, Tensor]:
    """row and col of (23), (batch, nheads, nchunks, chunk_size), without pairs of a token with itself, which cancel."""
    pairs = _split_groups(_pair_grads(x, dt, dA_cumsum, dy, masks), CB.shape[2], 1) * CB.transpose(1, 2)[:, :, None]
    pairs = pairs.flatten(1, 2).tril(-1)
    return pairs.sum(-1), pairs.sum(-2)


def ddA_cumsum(x, dt, dA_cumsum, dy, CB, masks) -> Tensor:
    """row - col of (23): (batch, nheads, nchunks, chunk_size)."""
    row, col = sum_pairs(x, dt, dA_cumsum, dy, CB, masks)
    return row - col


def chunk_cumsum_bwd(ddt, r, q, s, row_minus_col, dt, dt_raw, A, dt_bias, dt_softplus, dt_limit):
    """(20) to (25): ddt_raw (batch, seqlen, nheads), dA, ddt_bias. dt_raw (batch, seqlen, nheads)."""
    forward = (r + row_minus_col).flip(-1).cumsum(-1).flip(-1)
    da = forward + (q.cumsum(-1) - q) + s[..., None]
    dA = (dt * da).sum((0, 2, 3))
    ddt = (ddt + da * A[:, None, None]).permute(0, 2, 3, 1).flatten(1, 2)[:, : dt_raw.shape[1]]
    ddt, ddt_bias = step_bwd(ddt, dt_raw, dt_bias, dt_softplus, dt_limit)
    return ddt, dA, ddt_bias


def step_bwd(ddt, dt_raw, dt_bias, dt_softplus, dt_limit) -> tuple[Tensor, Tensor]:
    """(25): ddt_raw (batch, seqlen, nheads) and ddt_bias, from ddt, the gradient of the step."""
    unclamped = dt_raw if dt_bias is None else dt_raw + dt_bias
    if dt_softplus:
        slope, unclamped = unclamped.sigmoid(), F.softplus(unclamped)
        ddt = ddt * slope
    ddt = torch.where((unclamped < dt_limit[0]) | (unclamped > dt_limit[1]), 0.0, ddt)
    return ddt, ddt.sum((0, 1))
