"""chunk_scan_dz, equation (12): the gradients of the gate, dz, and of the output before it, dy.

    dz = dout * y * silu'(z),  dy = dout * silu(z)

Where no y was kept, y = out / silu(z) and silu'(z) / silu(z) = 1 / z + (1 - sigmoid(z)), so that nothing is divided by a gate
that is nearly 0.

Reads dout, z (batch, seqlen, nheads, headdim), any strides, and y or out, contiguous. Writes dz, any strides, and dy,
contiguous, in the dtype of x.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import cdiv, output
from ...kernels.device import keep_from_zero, sigmoid
from ...runtime.launch import launch
from ...runtime.tuning import ConfigSpace, next_power_of_2
from ...types import SSDSaved

CONFIGS = ConfigSpace(
    "chunk_scan_dz",
    axes={"BLOCK": None},
    entries=((2048, 4, 1), (4096, 4, 1), (1024, 4, 1)),
)


@triton.jit
def chunk_scan_dz_kernel(dout, y, out, z, dz, dy, dout_strides, z_strides, dz_strides, tokens, seqlen, CHANNELS: tl.constexpr,
                         HEADDIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """A block has neighbouring channels of a token, across heads: longer pieces of memory than a head has."""
    NBLOCKS: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    channel = (tl.program_id(0) % NBLOCKS * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    row = (tl.program_id(0) // NBLOCKS).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    inside = (row < tokens) & (channel < CHANNELS)
    b, token = row // seqlen, row % seqlen
    h, p = (channel // HEADDIM).to(tl.int64), (channel % HEADDIM).to(tl.int64)
    at = row * CHANNELS + channel

    dout_t = tl.load(dout + b * dout_strides[0] + token * dout_strides[1] + h * dout_strides[2] + p * dout_strides[3],
                     mask=inside, other=0.0).to(tl.float32)
    z_t = tl.load(z + b * z_strides[0] + token * z_strides[1] + h * z_strides[2] + p * z_strides[3], mask=inside,
                  other=0.0).to(tl.float32)
    z_t = keep_from_zero(z_t)
    s = sigmoid(z_t)
    if y is not None:
        dz_t = dout_t * tl.load(y + at, mask=inside, other=0.0).to(tl.float32) * s * (1.0 + z_t * (1.0 - s))
    else:
        dz_t = dout_t * tl.load(out + at, mask=inside, other=0.0).to(tl.float32) * (1.0 / z_t + (1.0 - s))
    tl.store(dz + b * dz_strides[0] + token * dz_strides[1] + h * dz_strides[2] + p * dz_strides[3],
             dz_t.to(dz.dtype.element_ty), mask=inside)
    tl.store(dy + at, (dout_t * z_t * s).to(dy.dtype.element_ty), mask=inside)


def chunk_scan_dz(saved: SSDSaved, dout: Tensor, into: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns dz and dy."""
    i = saved.inputs
    dz, dy = output(i.z, into), torch.empty(i.x.shape, device=i.x.device, dtype=i.x.dtype)
    config = CONFIGS.pick(i)
    tokens, channels = i.batch * i.seqlen, i.nheads * i.headdim
    block_c = min(config["BLOCK"], next_power_of_2(channels))
    block_m = config["BLOCK"] // block_c
    launch(
        chunk_scan_dz_kernel, cdiv(tokens, block_m) * cdiv(channels, block_c),
        dout, saved.y, saved.out, i.z, dz, dy, dout.stride(), i.z.stride(), dz.stride(), tokens, i.seqlen, channels, i.headdim,
        block_m, block_c, num_warps=config.num_warps)
    return dz, dy
