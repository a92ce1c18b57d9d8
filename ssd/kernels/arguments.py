"""How launchers describe tensors, sizes and dtypes to kernels."""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ..types import SSDInputs

# Arguments that count something, by which Triton is not to specialise: a kernel then serves all lengths that 16 divides, and is
# at one chunk or block what it is at several.
COUNTS = ("batch", "nblocks", "nchunks", "ndocs", "npieces", "nsums", "ntiles", "rows")
LONGEST_TILE = 256  # tokens of a chunk, or channels
_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


class Sizes(NamedTuple):
    """The sizes that a kernel is compiled for, as one constexpr argument."""

    nheads: int
    ngroups: int
    headdim: int
    dstate: int
    chunk: int


class Strides(NamedTuple):
    """The strides of a kernel's arguments that may have any, as one argument; () for those that are absent.

    (Not None: with Triton 3.6 what follows a None in a tuple is lost in nested loops.)

    Each tensor has four axes (batch, seqlen, heads or groups, channels), but for D, which has one or two. A tensor
    without a field here is contiguous, or the kernel has an argument for its strides alone.
    """

    x: tuple[int, ...] = ()
    z: tuple[int, ...] = ()
    B: tuple[int, ...] = ()
    C: tuple[int, ...] = ()
    D: tuple[int, ...] = ()
    dy: tuple[int, ...] = ()
    dx: tuple[int, ...] = ()


def get_sizes(i: SSDInputs) -> Sizes:
    return Sizes(i.nheads, i.ngroups, i.headdim, i.dstate, i.chunk_size)


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return _DTYPES[dtype]


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. triton.cdiv passes through a wrapper for kernels, which takes 2 us a call on the host."""
    return -(-a // b)


def strides(t: Tensor | None) -> tuple[int, ...]:
    """In elements; () for None."""
    return () if t is None else t.stride()


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


def fit_to_tiles(t: Tensor) -> Tensor:
    """t, or a copy where its offsets do not fit tiles."""
    return t if fits_tiles(t) else t.contiguous()


def output(like: Tensor, into: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Where a gradient goes: `into`, or a new contiguous tensor with the shape of `like`."""
    return torch.empty(like.shape, device=like.device, dtype=dtype or like.dtype) if into is None else into


def allocate_outputs(i: SSDInputs, save: bool) -> tuple[Tensor, Tensor | None]:
    """out, shaped as x; and y, the output before the gate, where `SSDInputs.keeps_y`."""
    out = torch.empty(i.x.shape, device=i.x.device, dtype=i.x.dtype)
    return out, torch.empty_like(out) if i.keeps_y(save) else None
