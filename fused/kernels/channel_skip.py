"""channel_skip, equation (19): what a D of two dimensions adds to the gradients of a backward that was given none.

    dx_j += D dy_j,  dD = sum_j dy_j x_j

The kernels for Hopper have one D for a head.

Reads x, dy (batch, seqlen, nheads, headdim) and D (nheads, headdim), adds to dx, shaped as x; all of any strides. Writes dD as
partial sums over blocks of tokens, (batch * nblocks, nheads, headdim) fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssd.kernels.arguments import cdiv, output
from ssd.kernels.device import product
from ssd.kernels.sum_parts import sum_first
from ssd.runtime.launch import launch
from ssd.runtime.tuning import next_power_of_2

_BLOCK_M = 64  # tokens of a program


@triton.jit
def locate_tile(strides, b, token, h, p):
    """Offsets of a tile of one head, (tokens, channels)."""
    return b * strides[0] + h * strides[2] + token[:, None] * strides[1] + p[None, :] * strides[3]


@triton.jit
def channel_skip_kernel(x, dy, D, dx, dD_parts, x_strides, dy_strides, D_strides, dx_strides, seqlen, nheads,
                        HEADDIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr):
    h, part = (tl.program_id(0) % nheads).to(tl.int64), (tl.program_id(0) // nheads).to(tl.int64)
    nblocks = tl.cdiv(seqlen, BLOCK_M)
    b, token, p = part // nblocks, part % nblocks * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_P).to(tl.int64)
    inside = (token < seqlen)[:, None] & (p < HEADDIM)[None, :]
    D_p = tl.load(D + h * D_strides[0] + p * D_strides[1], mask=p < HEADDIM, other=0.0).to(tl.float32)
    x_j = tl.load(x + locate_tile(x_strides, b, token, h, p), mask=inside, other=0.0).to(tl.float32)
    dy_j = tl.load(dy + locate_tile(dy_strides, b, token, h, p), mask=inside, other=0.0).to(tl.float32)
    tl.store(dD_parts + (part * nheads + h) * HEADDIM + p, tl.sum(product(dy_j, x_j), 0), mask=p < HEADDIM)
    at = dx + locate_tile(dx_strides, b, token, h, p)
    dx_j = tl.load(at, mask=inside, other=0.0).to(tl.float32) + dy_j * D_p[None, :]
    tl.store(at, dx_j.to(dx.dtype.element_ty), mask=inside)


def channel_skip(x: Tensor, dy: Tensor, D: Tensor, dx: Tensor) -> Tensor:
    """Adds to dx; returns dD, (nheads, headdim) fp32."""
    batch, seqlen, nheads, headdim = x.shape
    parts = torch.empty(batch * cdiv(seqlen, _BLOCK_M), nheads, headdim, device=x.device, dtype=torch.float32)
    launch(channel_skip_kernel, parts.shape[0] * nheads, x, dy, D, dx, parts, x.stride(), dy.stride(), D.stride(), dx.stride(),
           seqlen, nheads, HEADDIM=headdim, BLOCK_M=_BLOCK_M, BLOCK_P=next_power_of_2(headdim))
    return sum_first(parts, output(parts[0]))
