"""chunk_state_dB, first sum of equation (17): what the states add to dB, summed over the heads of a group.

Reads x (batch, seqlen, nheads, headdim), any strides; dt, dA_cumsum (batch, nheads, nchunks, chunk_size) fp32;
dstates (batch, nchunks, nheads, headdim, dstate). Writes dB as partial sums over splits of a group's heads, (nsplits,
batch, seqlen, ngroups, dstate) fp32, for bmm_bwd to complete.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import cdiv
from ...kernels.device import chunk_offset, document_at_end, split_heads, unpack_program
from ...runtime.launch import launch
from ...runtime.tuning import ConfigSpace, head_splits
from ...types import Options, SSDInputs
from .chunk_state import weights_to_end

CONFIGS = ConfigSpace(
    "chunk_state_dB",
    axes={"BLOCK_M": "chunk_size", "BLOCK_N": "dstate", "BLOCK_P": "headdim"},
    entries=((64, 128, 64, 4, 3), (64, 64, 64, 4, 3), (128, 64, 64, 4, 3), (128, 128, 64, 8, 3), (64, 128, 64, 8, 3),
             (64, 128, 64, 4, 4), (64, 128, 64, 4, 2), (128, 128, 64, 8, 2)),
    staged=(("BLOCK_M", "BLOCK_P"), ("BLOCK_P", "BLOCK_N")),
)


@triton.jit
def chunk_state_dB_kernel(x, x_strides, dt, dA_cumsum, seq_idx, dstates, dB_parts, seqlen, nchunks, part_stride,
                          NHEADS: tl.constexpr, NGROUPS: tl.constexpr, HEADDIM: tl.constexpr, DSTATE: tl.constexpr,
                          CHUNK: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
                          BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr):
    DTYPE: tl.constexpr = x.dtype.element_ty
    NTILES_N: tl.constexpr = (DSTATE + BLOCK_N - 1) // BLOCK_N
    HEADS: tl.constexpr = NHEADS // NGROUPS
    tile, slot, c, b = unpack_program(CHUNK // BLOCK_M * NTILES_N, NGROUPS * SPLITS, nchunks)
    g, split, head, count = split_heads(slot, HEADS, SPLITS)
    head += g * HEADS
    token, first = c * CHUNK, tile // NTILES_N * BLOCK_M
    rows = tl.minimum(CHUNK, seqlen - token).to(tl.int32)
    if first >= rows:
        return
    offs_j, n = first + tl.arange(0, BLOCK_M), tile % NTILES_N * BLOCK_N + tl.arange(0, BLOCK_N)
    in_j, in_n = offs_j < rows, n < DSTATE
    document = 0
    if seq_idx is not None:
        document = document_at_end(seq_idx, b, c, seqlen, CHUNK)
        seq_idx += b * seqlen + token
    x += chunk_offset(x_strides, b, token, head)
    per_head = ((b * NHEADS + head) * nchunks + c) * CHUNK
    dt += per_head
    dA_cumsum += per_head
    dstates += ((b * nchunks + c) * NHEADS + head) * HEADDIM * DSTATE

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(count):
        w = weights_to_end(offs_j, dt, dA_cumsum, seq_idx, rows - 1, document)[:, None]
        for start in range(0, HEADDIM, BLOCK_P):
            p = start + tl.arange(0, BLOCK_P)
            x_j = tl.load(x + offs_j[:, None] * x_strides[1] + p[None, :] * x_strides[3],
                          mask=in_j[:, None] & (p < HEADDIM)[None, :], other=0.0)
            dS = tl.load(dstates + p[:, None] * DSTATE + n[None, :], mask=(p < HEADDIM)[:, None] & in_n[None, :], other=0.0)
            acc = tl.dot((x_j.to(tl.float32) * w).to(DTYPE), dS.to(DTYPE), acc, input_precision=PRECISION)
        x += x_strides[2]
        dt += nchunks * CHUNK
        dA_cumsum += nchunks * CHUNK
        dstates += HEADDIM * DSTATE
    dB_parts += split * part_stride + ((b * seqlen + token) * NGROUPS + g) * DSTATE
    tl.store(dB_parts + offs_j[:, None] * (NGROUPS * DSTATE) + n[None, :], acc, mask=in_j[:, None] & in_n[None, :])


def chunk_state_dB(i: SSDInputs, dt: Tensor, dA_cumsum: Tensor, dstates: Tensor, options: Options) -> Tensor:
    """Returns the part of dB that comes through the states, as partial sums over splits of the heads."""
    config = CONFIGS.pick(i)
    tiles = i.chunk_size // config["BLOCK_M"] * cdiv(i.dstate, config["BLOCK_N"])
    programs = tiles * i.ngroups * i.nchunks * i.batch
    splits = head_splits(i, programs)
    dB_parts = torch.empty(splits, *i.B.shape, device=i.x.device, dtype=torch.float32)
    launch(
        chunk_state_dB_kernel, programs * splits,
        i.x, i.x.stride(), dt, dA_cumsum, i.seq_idx, dstates, dB_parts, i.seqlen, i.nchunks, dB_parts.stride(0), i.nheads,
        i.ngroups, i.headdim, i.dstate, i.chunk_size, splits, options.precision, **config.launch)
    return dB_parts
