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


def check_numbers(name: str, t: object, x: Tensor) -> None:
    """Refuses what is not a tensor of integers on the device of x."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: got {type(t).__name__}, expected a tensor of int32 or int64")
    if t.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: got dtype {t.dtype}, expected torch.int32 or torch.int64")
    if t.device != x.device:
        raise ValueError(f"{name}: got a tensor on {t.device}, expected {x.device}, the device of x")


def check_bounds(cu_seqlens: object, x: Tensor, seqlen: int, name: str = "cu_seqlens") -> None:
    """Refuses what are no boundaries of documents in x (1, ...) of that many tokens; looks at values on the CPU only."""
    check_numbers(name, cu_seqlens, x)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"{name}: got shape {tuple(cu_seqlens.shape)}, expected (ndocs + 1,) with at least one document")
    if x.shape[0] != 1:
        raise ValueError(f"{name}: got batch = {x.shape[0]}, expected batch 1: all documents packed in one row")
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != seqlen or bounds != sorted(bounds):
            raise ValueError(f"{name}: got {bounds}, expected rising numbers from 0 to seqlen = {seqlen}")


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


def place_states(cu_seqlens: Tensor, seqlen: int, held: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where rows are when each document has `held` more before its tokens, its state: the states' (ndocs * held,), the tokens'
    (seqlen,), and those that come last of each document, (ndocs * held,). All int64.
    """
    place = _place_states if are_plain((cu_seqlens,)) else _PLACE_OP
    return place(cu_seqlens, seqlen, held)


def _place_states(cu_seqlens: Tensor, seqlen: int, held: int) -> tuple[Tensor, Tensor, Tensor]:
    bounds = find_bounds(cu_seqlens, seqlen)
    tokens = torch.arange(seqlen, device=bounds.device)
    document = torch.searchsorted(bounds[1:], tokens, right=True)
    before = held * torch.arange(bounds.shape[0] - 1, device=bounds.device)  # rows of states of the documents before
    each = before[:, None] + torch.arange(held, device=bounds.device)
    return (bounds[:-1, None] + each).flatten(), tokens + before[document] + held, (bounds[1:, None] + each).flatten()


def _place_states_fake(cu_seqlens, seqlen, held):
    states = (cu_seqlens.shape[0] - 1) * held
    return tuple(cu_seqlens.new_empty(size, dtype=torch.int64) for size in (states, seqlen, states))


_PLACE_OP = define_op("place_states", "(Tensor cu_seqlens, int seqlen, int held) -> (Tensor, Tensor, Tensor)", _place_states,
                      _place_states_fake)
