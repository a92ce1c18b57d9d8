"""chunk_scan_dz, equation (12): the gradients of the gate, dz, and of the output before it, dy.

    dz = dout * y * silu'(z),  dy = dout * silu(z)

Reads dout, z (batch, seqlen, nheads, headdim), any strides, and y, contiguous. Writes dz, any strides, and dy,
contiguous, in the dtype of y.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import cdiv, output
from ...kernels.device import sigmoid, unpack_program
from ...runtime.launch import launch
from ...runtime.tuning import ConfigSpace, next_power_of_2
from ...types import SSDInputs

CONFIGS = ConfigSpace(
    "chunk_scan_dz",
    axes={"BLOCK": None},
    entries=((2048, 4, 1), (4096, 4, 1), (1024, 4, 1)),
)


@triton.jit
def chunk_scan_dz_kernel(dout, y, z, dz, dy, dout_strides, z_strides, dz_strides, seqlen, NHEADS: tl.constexpr,
                         HEADDIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr):
    tile, h, _, b = unpack_program(tl.cdiv(seqlen, BLOCK_M), NHEADS, 1)
    token = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_p = tl.arange(0, BLOCK_P)[None, :]
    inside = (token < seqlen) & (offs_p < HEADDIM)
    at = ((b * seqlen + token) * NHEADS + h) * HEADDIM + offs_p

    dout_t = tl.load(dout + b * dout_strides[0] + token * dout_strides[1] + h * dout_strides[2] + offs_p * dout_strides[3],
                     mask=inside, other=0.0).to(tl.float32)
    z_t = tl.load(z + b * z_strides[0] + token * z_strides[1] + h * z_strides[2] + offs_p * z_strides[3], mask=inside,
                  other=0.0).to(tl.float32)
    y_t = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    gate = sigmoid(z_t)
    dz_t = dout_t * y_t * gate * (1.0 + z_t * (1.0 - gate))
    tl.store(dz + b * dz_strides[0] + token * dz_strides[1] + h * dz_strides[2] + offs_p * dz_strides[3],
             dz_t.to(dz.dtype.element_ty), mask=inside)
    tl.store(dy + at, (dout_t * z_t * gate).to(dy.dtype.element_ty), mask=inside)


def chunk_scan_dz(i: SSDInputs, dout: Tensor, y: Tensor, into: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns dz and dy."""
    dz, dy = output(i.z, into), torch.empty_like(y)
    config = CONFIGS.pick(i)
    block_p = next_power_of_2(i.headdim)
    block_m = max(1, config["BLOCK"] // block_p)
    launch(
        chunk_scan_dz_kernel, cdiv(i.seqlen, block_m) * i.nheads * i.batch,
        dout, y, i.z, dz, dy, dout.stride(), i.z.stride(), dz.stride(), i.seqlen, i.nheads, i.headdim, block_m, block_p,
        num_warps=config.num_warps)
    return dz, dy
