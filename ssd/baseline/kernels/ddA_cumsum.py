"""ddA_cumsum, equation (23): the row and column sums of K_ij CB_ij below the diagonal, per head; K as in (15).

    row_i = sum_{j<i} K_ij CB_ij,  col_j = sum_{i>j} K_ij CB_ij

Reads x, dy (batch, seqlen, nheads, headdim), any strides; dt, dA_cumsum (batch, nheads, nchunks, chunk_size) fp32; CB
(batch, nchunks, ngroups, chunk_size, chunk_size) fp32. Writes row (batch, nheads, nchunks, chunk_size) fp32, and col
as partial sums over tiles of rows, (ntiles, batch, nheads, nchunks, chunk_size) fp32, unwritten where a tile's rows
all lie above the column.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import COUNTS, Strides, get_sizes
from ...kernels.device import CB_offset, causal, chunk_offset, step_offset, unpack_program
from ...runtime.launch import launch
from ...runtime.tuning import ConfigSpace
from ...types import Options, SSDInputs
from .chunk_scan_dCB import pair_grads

CONFIGS = ConfigSpace(
    "ddA_cumsum",
    axes={"BLOCK_M": "chunk_size", "BLOCK_K": "chunk_size", "BLOCK_P": "headdim"},
    entries=((64, 64, 64, 4, 3), (128, 64, 64, 4, 3), (128, 128, 64, 8, 3), (64, 64, 64, 4, 2), (128, 64, 64, 8, 3),
             (128, 64, 64, 8, 2)),
    staged=(("BLOCK_M", "BLOCK_P"), ("BLOCK_P", "BLOCK_K"), ("BLOCK_M", "BLOCK_K"), ("BLOCK_M", "BLOCK_K")),
)


@triton.jit(do_not_specialize=COUNTS)
def ddA_cumsum_kernel(x, dy, dt, dA_cumsum, CB, seq_idx, row, col_tiles, strides, seqlen, nchunks, col_stride,
                      SIZES: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
                      BLOCK_P: tl.constexpr):
    tile, h, c, b = unpack_program(SIZES.chunk // BLOCK_M, SIZES.nheads, nchunks)
    token, first = c * SIZES.chunk, tile * BLOCK_M
    rows = tl.minimum(SIZES.chunk, seqlen - token).to(tl.int32)
    offs_i = first + tl.arange(0, BLOCK_M)
    x += chunk_offset(strides.x, b, token, h)
    dy += chunk_offset(strides.dy, b, token, h)
    steps = step_offset(b, h, c, nchunks, SIZES)
    dt += steps
    dA_cumsum += steps
    row += steps
    col_tiles += tile.to(tl.int64) * col_stride + steps
    CB += CB_offset(b, c, h // (SIZES.nheads // SIZES.ngroups), nchunks, SIZES)
    if seq_idx is not None:
        seq_idx += b * seqlen + token
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, first + BLOCK_M, BLOCK_K):
        offs_j = start + tl.arange(0, BLOCK_K)
        grads = pair_grads(x, dy, strides, dt, dA_cumsum, offs_i, offs_j, rows, SIZES.headdim, BLOCK_P, PRECISION)
        grads *= tl.load(CB + offs_i[:, None] * SIZES.chunk + offs_j[None, :])
        below = causal(offs_i, offs_j, seq_idx, rows, False) & (offs_i[:, None] != offs_j[None, :])
        grads = tl.where(below, grads, 0.0)
        row_sum += tl.sum(grads, 1)
        tl.store(col_tiles + offs_j, tl.sum(grads, 0))
    tl.store(row + offs_i, row_sum)


def ddA_cumsum(i: SSDInputs, dt: Tensor, dA_cumsum: Tensor, dy: Tensor, CB: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Returns row and the partial sums of col."""
    config = CONFIGS.pick(i)
    ntiles = i.chunk_size // config["BLOCK_M"]
    row = torch.empty_like(dA_cumsum)
    col_tiles = torch.empty(ntiles, *dA_cumsum.shape, device=row.device, dtype=torch.float32)
    launch(
        ddA_cumsum_kernel, ntiles * i.nheads * i.nchunks * i.batch,
        i.x, dy, dt, dA_cumsum, CB, i.seq_idx, row, col_tiles, Strides(x=i.x.stride(), dy=dy.stride()), i.seqlen, i.nchunks,
        col_tiles.stride(0), get_sizes(i), options.precision, **config.launch)
    return row, col_tiles
