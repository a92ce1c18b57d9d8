"""Variant `fla`: flash-linear-attention's `chunk_simple_gla`, with the rest of the operator in torch around it.

Its state is (3) of docs/ssd.md transposed: key B, value dt x, query C and log decay dt A, a key and a query for each head.
On Hopper its backward is wrong below Triton 3.7.1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry import Variant
from ..types import SSDInputs

try:
    from fla.ops.simple_gla import chunk_simple_gla
except ImportError as error:
    raise ImportError(f"fla cannot be imported ({error}); pip install flash-linear-attention", name="fla") from error

_CHUNK_SIZE = 64
_DTYPES = (torch.float16, torch.bfloat16)


def _supports(inputs: SSDInputs) -> str | None:
    i = inputs
    if not i.x.is_cuda:
        return f"its kernels need CUDA tensors, got x on {i.x.device}"
    if i.x.dtype not in _DTYPES:
        return f"it multiplies fp32 in TF32, so x must be one of {', '.join(map(str, _DTYPES))}, got {i.x.dtype}"
    if i.chunk_size != _CHUNK_SIZE:
        return f"its chunk_size is {_CHUNK_SIZE}, got {i.chunk_size}"
    if i.seq_idx is not None and i.batch > 1:
        return f"it packs documents in one row only, got seq_idx with batch = {i.batch}"
    if i.cu_seqlens is not None:
        return "the state at the end of each document is not returned"
    if i.state_dtype not in (None, i.x.dtype):
        return f"it keeps states in the dtype of x, {i.x.dtype}, got state_dtype = {i.state_dtype}"
    return None


def _apply(inputs: SSDInputs) -> tuple[Tensor, Tensor]:
    i, dtype = inputs, inputs.x.dtype
    dt = i.dt.float() if i.dt_bias is None else i.dt.float() + i.dt_bias.float()
    dt = (F.softplus(dt) if i.dt_softplus else dt).clamp(*i.dt_limit)
    B, C = (t.to(dtype).repeat_interleave(i.nheads // i.ngroups, 2) for t in (i.B, i.C))
    initial_states = None if i.initial_states is None else i.initial_states.float().mT.contiguous()
    ends = None
    if i.seq_idx is not None:
        ends, initial_states = _documents(i.seq_idx, initial_states)
    y, states = chunk_simple_gla(
        q=C, k=B, v=(i.x * dt[..., None]).to(dtype), g=dt * i.A.float(), scale=1.0, initial_state=initial_states,
        output_final_state=True, cu_seqlens=ends)
    y = y.float()
    if i.D is not None:
        y = y + (i.D if i.D.dim() == 2 else i.D[:, None]) * i.x
    if i.z is not None:
        y = y * F.silu(i.z.float())
    return y.to(dtype), states[-i.batch :].mT.contiguous()


def _documents(seq_idx: Tensor, initial_states: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Boundaries of the documents of one row, and a state for each to start from: that given for a leading document 0."""
    row = seq_idx[0].long()
    starts = F.pad((row.diff() != 0).nonzero().flatten() + 1, (1, 0))
    ends = F.pad(starts, (0, 1), value=row.numel())
    if initial_states is None:
        return ends, None
    first = torch.where(row[0] == 0, initial_states, 0.0)
    return ends, torch.cat([first, first.new_zeros(starts.numel() - 1, *first.shape[1:])])


VARIANT = Variant("fla", supports=_supports, apply=_apply,
                  adapts="times include B and C expanded to heads, and the step, D and z in torch: its caller's part")
