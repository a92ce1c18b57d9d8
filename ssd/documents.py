"""The documents that are packed in a row: where they begin, and their numbers, seq_idx as `SSDInputs` has it.

The numbers come from an op of their own, which torch.compile does not look into. What inductor makes of torch.searchsorted on a
GPU (torch 2.11) had a document of one token start at 1, where initial states do not reach.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .runtime.custom_ops import are_plain, define_op


def number_documents(seq_idx: Tensor | None, cu_seqlens: Tensor | None, seqlen: int) -> Tensor:
    """(batch, seqlen) int32, contiguous: numbers that never repeat, equal exactly within a document.

    Args:
        seq_idx: (batch, seqlen) integers. A document begins wherever the value changes; only a leading run of 0 is numbered 0.
        cu_seqlens: (ndocs + 1,) integers, for batch 1; read where seq_idx is None. Empty documents have a number, too.
    """
    number = _number if are_plain((seq_idx, cu_seqlens)) else _OP
    return number(seq_idx, cu_seqlens, seqlen)


def find_bounds(cu_seqlens: Tensor, seqlen: int) -> Tensor:
    """(ndocs + 1,) int64: cu_seqlens, of which on a GPU nobody has checked the values, made to rise from 0 to seqlen."""
    inside = cu_seqlens[1:-1].long().clamp(0, seqlen)
    inside = inside.cummax(0)[0] if inside.numel() else inside
    return torch.nn.functional.pad(torch.nn.functional.pad(inside, (1, 0)), (0, 1), value=seqlen)


def _number(seq_idx: Tensor | None, cu_seqlens: Tensor | None, seqlen: int) -> Tensor:
    if seq_idx is not None:
        starts = torch.cat([seq_idx[:, :1] != 0, seq_idx[:, 1:] != seq_idx[:, :-1]], 1)
        return starts.cumsum(1, dtype=torch.int32)
    tokens = torch.arange(seqlen, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True, out_int32=True)[None]


def _number_fake(seq_idx, cu_seqlens, seqlen):
    like = seq_idx if seq_idx is not None else cu_seqlens
    return like.new_empty((like.shape[0] if seq_idx is not None else 1, seqlen), dtype=torch.int32)


_OP = define_op("number_documents", "(Tensor? seq_idx, Tensor? cu_seqlens, int seqlen) -> Tensor", _number, _number_fake)
