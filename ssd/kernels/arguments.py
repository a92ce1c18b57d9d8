"""How launchers describe tensors and dtypes to kernels."""

import torch
import triton.language as tl
from torch import Tensor

LONGEST_TILE = 256  # tokens of a chunk, or channels
_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return _DTYPES[dtype]


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. triton.cdiv passes through a wrapper for kernels, which takes 2 us a call on the host."""
    return -(-a // b)


def strides(t: Tensor | None) -> tuple[int, ...] | None:
    return None if t is None else t.stride()


def contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def fits_tiles(t: Tensor | None) -> bool:
    """Whether offsets inside one chunk of t, (batch, seqlen, heads or groups, channels), fit int32, as tiles have them.

    Offsets of batches, chunks and heads are int64, whatever the strides.
    """
    if t is None:
        return True
    _, along_seqlen, _, along_channels = t.stride()
    return LONGEST_TILE * (along_seqlen + along_channels) < 2**31


def fitted(t: Tensor) -> Tensor:
    """t, or a copy where its offsets do not fit tiles."""
    return t if fits_tiles(t) else t.contiguous()


def per_channel_strides(D: Tensor | None) -> tuple[int, int] | None:
    """Strides of D as (nheads, headdim), where D (nheads,) repeats along headdim."""
    if D is None:
        return None
    return D.stride() if D.dim() == 2 else (D.stride(0), 0)


def output(like: Tensor, into: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Where a gradient goes: `into`, or a new contiguous tensor with the shape of `like`."""
    return torch.empty(like.shape, device=like.device, dtype=dtype or like.dtype) if into is None else into
