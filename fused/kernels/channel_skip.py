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
from ssd.kernels.device import chunk_offset, load_skip, load_tokens, store_tokens, unpack_program
from ssd.kernels.sum_parts import sum_first
from ssd.runtime.launch import launch
from ssd.runtime.tuning import next_power_of_2

from .dB_dx import skip_grads

_BLOCK_M = 64  # tokens of a program


@triton.jit
def channel_skip_kernel(x, dy, D, dx, dD_parts, x_strides, dy_strides, D_strides, dx_strides, seqlen, nheads,
                        HEADDIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr):
    nblocks = tl.cdiv(seqlen, BLOCK_M)
    _, h, c, b = unpack_program(1, nheads, nblocks)
    token, offs_m, offs_p = c * BLOCK_M, tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_P)
    rows = seqlen - token
    x += chunk_offset(x_strides, b, token, h)
    dy += chunk_offset(dy_strides, b, token, h)
    dx += chunk_offset(dx_strides, b, token, h)
    x_j = load_tokens(x, x_strides, offs_m, offs_p, rows, HEADDIM).to(tl.float32)
    dy_j = load_tokens(dy, dy_strides, offs_m, offs_p, rows, HEADDIM).to(tl.float32)
    skip_grads(dD_parts + ((b * nblocks + c) * nheads + h) * HEADDIM, dy_j, x_j, offs_p, HEADDIM, True)
    dx_j = load_tokens(dx, dx_strides, offs_m, offs_p, rows, HEADDIM).to(tl.float32)
    dx_j += load_skip(D, D_strides, h, offs_p, HEADDIM) * dy_j
    store_tokens(dx, dx_strides, offs_m, offs_p, rows, dx_j, HEADDIM)


def channel_skip(x: Tensor, dy: Tensor, D: Tensor, dx: Tensor) -> Tensor:
    """Adds to dx; returns dD, (nheads, headdim) fp32."""
    batch, seqlen, nheads, headdim = x.shape
    parts = torch.empty(batch * cdiv(seqlen, _BLOCK_M), nheads, headdim, device=x.device, dtype=torch.float32)
    launch(channel_skip_kernel, parts.shape[0] * nheads, x, dy, D, dx, parts, x.stride(), dy.stride(), D.stride(), dx.stride(),
           seqlen, nheads, HEADDIM=headdim, BLOCK_M=_BLOCK_M, BLOCK_P=next_power_of_2(headdim))
    return sum_first(parts, output(parts[0]))
