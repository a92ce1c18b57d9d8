"""chunk_scan_dCB, equation (15): the gradient of CB, summed over the heads of a group.

    dCB_ij = sum_heads K_ij,  K_ij = m(j, i) exp(A_i - A_j) dt_j (dy_i . x_j) for j <= i

Reads x, dy (batch, seqlen, nheads, headdim), any strides; dt, dA_cumsum (batch, nheads, nchunks, chunk_size) fp32.
Writes dCB as partial sums over splits of a group's heads, (nsplits, batch, nchunks, ngroups, chunk_size, chunk_size),
fp32, or the dtype of x if there is one split: then it is an operand as it is. Tiles that lie wholly above the
diagonal are left unwritten.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import COUNTS, Strides, get_sizes, output
from ...kernels.device import (
    CB_offset,
    causal,
    chunk_offset,
    decay,
    load_tokens,
    load_tokens_t,
    split_heads,
    step_offset,
    unpack_program,
)
from ...kernels.sum_parts import sum_first
from ...runtime.launch import launch
from ...runtime.tuning import ConfigSpace, head_splits
from ...types import Options, SSDInputs

CONFIGS = ConfigSpace(
    "chunk_scan_dCB",
    axes={"BLOCK_M": "chunk_size", "BLOCK_N": "chunk_size", "BLOCK_P": "headdim"},
    entries=((64, 64, 64, 4, 3), (128, 64, 64, 4, 3), (128, 64, 64, 8, 3), (128, 128, 64, 8, 3), (64, 64, 64, 4, 4),
             (64, 128, 64, 4, 3), (64, 64, 64, 4, 2)),
    staged=(("BLOCK_M", "BLOCK_P"), ("BLOCK_P", "BLOCK_N")),
)


@triton.jit
def pair_grads(x, dy, strides, dt, dA_cumsum, offs_i, offs_j, rows, HEADDIM: tl.constexpr, BLOCK_P: tl.constexpr,
               PRECISION: tl.constexpr):
    """K_ij of one head, a tile [i, j] fp32, unmasked; pointers at the chunk's first token."""
    acc = tl.zeros([offs_i.shape[0], offs_j.shape[0]], tl.float32)
    for start in range(0, HEADDIM, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        dy_i = load_tokens(dy, strides.dy, offs_i, p, rows, HEADDIM)  # [i, BLOCK_P]
        x_t = load_tokens_t(x, strides.x, offs_j, p, rows, HEADDIM)  # [BLOCK_P, j]
        acc = tl.dot(dy_i, x_t, acc, input_precision=PRECISION)
    acc *= decay(tl.load(dA_cumsum + offs_i)[:, None] - tl.load(dA_cumsum + offs_j)[None, :])
    return acc * tl.load(dt + offs_j)[None, :]


@triton.jit(do_not_specialize=COUNTS)
def chunk_scan_dCB_kernel(x, dy, dt, dA_cumsum, seq_idx, dCB_parts, strides, seqlen, nchunks, part_stride, SIZES: tl.constexpr,
                          SPLITS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                          BLOCK_P: tl.constexpr):
    NTILES_N: tl.constexpr = SIZES.chunk // BLOCK_N
    HEADS: tl.constexpr = SIZES.nheads // SIZES.ngroups
    tile, slot, c, b = unpack_program(SIZES.chunk // BLOCK_M * NTILES_N, SIZES.ngroups * SPLITS, nchunks)
    g, split, head, count = split_heads(slot, HEADS, SPLITS)
    head += g * HEADS
    first_i, first_j = tile // NTILES_N * BLOCK_M, tile % NTILES_N * BLOCK_N
    token = c * SIZES.chunk
    rows = tl.minimum(SIZES.chunk, seqlen - token).to(tl.int32)
    if first_j >= first_i + BLOCK_M or first_i >= rows:
        return
    offs_i, offs_j = first_i + tl.arange(0, BLOCK_M), first_j + tl.arange(0, BLOCK_N)
    x += chunk_offset(strides.x, b, token, head)
    dy += chunk_offset(strides.dy, b, token, head)
    dt += step_offset(b, head, c, nchunks, SIZES)
    dA_cumsum += step_offset(b, head, c, nchunks, SIZES)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(count):
        acc += pair_grads(x, dy, strides, dt, dA_cumsum, offs_i, offs_j, rows, SIZES.headdim, BLOCK_P, PRECISION)
        x += strides.x[2]
        dy += strides.dy[2]
        dt += nchunks * SIZES.chunk
        dA_cumsum += nchunks * SIZES.chunk
    if seq_idx is not None:
        seq_idx += b * seqlen + token
    acc = tl.where(causal(offs_i, offs_j, seq_idx, rows, False), acc, 0.0)
    dCB_parts += split * part_stride + CB_offset(b, c, g, nchunks, SIZES)
    tl.store(dCB_parts + offs_i[:, None] * SIZES.chunk + offs_j[None, :], acc.to(dCB_parts.dtype.element_ty))


def chunk_scan_dCB(i: SSDInputs, dt: Tensor, dA_cumsum: Tensor, dy: Tensor, options: Options) -> Tensor:
    """Returns dCB, in the dtype of x: it is an operand of bmm_bwd."""
    config = CONFIGS.pick(i)
    tiles = i.chunk_size // config["BLOCK_M"] * (i.chunk_size // config["BLOCK_N"])
    programs = tiles * i.ngroups * i.nchunks * i.batch
    splits = head_splits(i, programs)
    dtype = i.x.dtype if splits == 1 else torch.float32  # rounded once, when its sum is complete
    shape = (splits, i.batch, i.nchunks, i.ngroups, i.chunk_size, i.chunk_size)
    dCB_parts = torch.empty(shape, device=i.x.device, dtype=dtype)
    launch(
        chunk_scan_dCB_kernel, programs * splits,
        i.x, dy, dt, dA_cumsum, i.seq_idx, dCB_parts, Strides(x=i.x.stride(), dy=dy.stride()), i.seqlen, i.nchunks,
        dCB_parts.stride(0), get_sizes(i), splits, options.precision, **config.launch)
    return dCB_parts[0] if splits == 1 else sum_first(dCB_parts, output(dCB_parts[0], dtype=i.x.dtype))
