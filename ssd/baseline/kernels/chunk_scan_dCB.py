"""chunk_scan_dCB, equation (15): the gradient of CB, summed over the heads of a group.

Reads x, dy (batch, seqlen, nheads, headdim), any strides; dt, dA_cumsum (batch, nheads, nchunks, chunk_size) fp32.
Writes dCB as partial sums over splits of a group's heads, (nsplits, batch, nchunks, ngroups, chunk_size, chunk_size),
fp32, or the dtype of x if there is one split: then it is an operand as it is; tiles that lie wholly above the
diagonal are left unwritten.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import output
from ...kernels.device import causal, chunk_offset, decay, split_heads, unpack_program
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
def pair_grads(x, x_strides, dy, dy_strides, dt, dA_cumsum, offs_i, offs_j, rows, HEADDIM: tl.constexpr, BLOCK_P: tl.constexpr,
               PRECISION: tl.constexpr):
    """(dy_i . x_j) exp(A_i - A_j) dt_j of one head, a tile [i, j] fp32, unmasked; pointers at the chunk's first token."""
    in_i, in_j = offs_i < rows, offs_j < rows
    acc = tl.zeros([offs_i.shape[0], offs_j.shape[0]], tl.float32)
    for start in range(0, HEADDIM, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        in_p = p < HEADDIM
        dy_i = tl.load(dy + offs_i[:, None] * dy_strides[1] + p[None, :] * dy_strides[3], mask=in_i[:, None] & in_p[None, :],
                       other=0.0)
        x_t = tl.load(x + offs_j[None, :] * x_strides[1] + p[:, None] * x_strides[3], mask=in_j[None, :] & in_p[:, None],
                      other=0.0)
        acc = tl.dot(dy_i, x_t, acc, input_precision=PRECISION)
    acc *= decay(tl.load(dA_cumsum + offs_i)[:, None] - tl.load(dA_cumsum + offs_j)[None, :])
    return acc * tl.load(dt + offs_j)[None, :]


@triton.jit
def chunk_scan_dCB_kernel(x, x_strides, dy, dy_strides, dt, dA_cumsum, seq_idx, dCB_parts, seqlen, nchunks, part_stride,
                          NHEADS: tl.constexpr, NGROUPS: tl.constexpr, HEADDIM: tl.constexpr, CHUNK: tl.constexpr,
                          SPLITS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                          BLOCK_P: tl.constexpr):
    NTILES_N: tl.constexpr = CHUNK // BLOCK_N
    HEADS: tl.constexpr = NHEADS // NGROUPS
    tile, slot, c, b = unpack_program(CHUNK // BLOCK_M * NTILES_N, NGROUPS * SPLITS, nchunks)
    g, split, head, count = split_heads(slot, HEADS, SPLITS)
    head += g * HEADS
    first_i, first_j = tile // NTILES_N * BLOCK_M, tile % NTILES_N * BLOCK_N
    token = c * CHUNK
    rows = tl.minimum(CHUNK, seqlen - token).to(tl.int32)
    if first_j >= first_i + BLOCK_M or first_i >= rows:
        return
    offs_i, offs_j = first_i + tl.arange(0, BLOCK_M), first_j + tl.arange(0, BLOCK_N)
    x += chunk_offset(x_strides, b, token, head)
    dy += chunk_offset(dy_strides, b, token, head)
    per_head = ((b * NHEADS + head) * nchunks + c) * CHUNK
    dt += per_head
    dA_cumsum += per_head
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(count):
        acc += pair_grads(x, x_strides, dy, dy_strides, dt, dA_cumsum, offs_i, offs_j, rows, HEADDIM, BLOCK_P, PRECISION)
        x += x_strides[2]
        dy += dy_strides[2]
        dt += nchunks * CHUNK
        dA_cumsum += nchunks * CHUNK
    if seq_idx is not None:
        seq_idx += b * seqlen + token
    acc = tl.where(causal(offs_i, offs_j, seq_idx, rows, False), acc, 0.0)
    dCB_parts += split * part_stride + ((b * nchunks + c) * NGROUPS + g) * CHUNK * CHUNK
    tl.store(dCB_parts + offs_i[:, None] * CHUNK + offs_j[None, :], acc.to(dCB_parts.dtype.element_ty))


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
        i.x, i.x.stride(), dy, dy.stride(), dt, dA_cumsum, i.seq_idx, dCB_parts, i.seqlen, i.nchunks, dCB_parts.stride(0),
        i.nheads, i.ngroups, i.headdim, i.chunk_size, splits, options.precision, **config.launch)
    return dCB_parts[0] if splits == 1 else sum_first(dCB_parts, output(dCB_parts[0], dtype=i.x.dtype))
