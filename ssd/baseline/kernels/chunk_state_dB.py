"""chunk_state_dB, first sum of equation (17): what the states add to dB, summed over the heads of a group.

    dB_j += sum_heads m(j, last) exp(A_last - A_j) dt_j x_j dS

Reads x (batch, seqlen, nheads, headdim), any strides; dt, dA_cumsum (batch, nheads, nchunks, chunk_size) fp32;
dstates, dS, (batch, nchunks, nheads, headdim, dstate). Writes dB as partial sums over splits of a group's heads, (nsplits,
batch, seqlen, ngroups, dstate) fp32, for bmm_bwd to complete.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import COUNTS, cdiv, get_sizes
from ...kernels.device import (
    chunk_offset,
    decays_to_end,
    load_state,
    load_tokens,
    split_heads,
    state_offset,
    step_offset,
    unpack_program,
)
from ...runtime.launch import launch
from ...runtime.tuning import ConfigSpace, head_splits
from ...types import Options, SSDInputs

CONFIGS = ConfigSpace(
    "chunk_state_dB",
    axes={"BLOCK_M": "chunk_size", "BLOCK_N": "dstate", "BLOCK_P": "headdim"},
    entries=((64, 128, 64, 4, 3), (64, 64, 64, 4, 3), (128, 64, 64, 4, 3), (128, 128, 64, 8, 3), (64, 128, 64, 8, 3),
             (64, 128, 64, 4, 4), (64, 128, 64, 4, 2), (128, 128, 64, 8, 2)),
    staged=(("BLOCK_M", "BLOCK_P"), ("BLOCK_P", "BLOCK_N")),
)


@triton.jit(do_not_specialize=COUNTS)
def chunk_state_dB_kernel(x, dt, dA_cumsum, seq_idx, dstates, dB_parts, x_strides, seqlen, nchunks, part_stride,
                          SIZES: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
                          BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr):
    DTYPE: tl.constexpr = x.dtype.element_ty
    NTILES_N: tl.constexpr = (SIZES.dstate + BLOCK_N - 1) // BLOCK_N
    HEADS: tl.constexpr = SIZES.nheads // SIZES.ngroups
    tile, slot, c, b = unpack_program(SIZES.chunk // BLOCK_M * NTILES_N, SIZES.ngroups * SPLITS, nchunks)
    g, split, head, count = split_heads(slot, HEADS, SPLITS)
    head += g * HEADS
    token, first = c * SIZES.chunk, tile // NTILES_N * BLOCK_M
    rows = tl.minimum(SIZES.chunk, seqlen - token).to(tl.int32)
    if first >= rows:
        return
    offs_j, n = first + tl.arange(0, BLOCK_M), tile % NTILES_N * BLOCK_N + tl.arange(0, BLOCK_N)
    document = 0
    if seq_idx is not None:
        seq_idx += b * seqlen + token
        document = tl.load(seq_idx + rows - 1)
    x += chunk_offset(x_strides, b, token, head)
    dt += step_offset(b, head, c, nchunks, SIZES)
    dA_cumsum += step_offset(b, head, c, nchunks, SIZES)
    dstates += state_offset(b, c, head, nchunks, SIZES)

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(count):
        w = decays_to_end(offs_j, dt, dA_cumsum, seq_idx, rows - 1, document)[:, None]
        for start in range(0, SIZES.headdim, BLOCK_P):
            p = start + tl.arange(0, BLOCK_P)
            x_j = load_tokens(x, x_strides, offs_j, p, rows, SIZES.headdim)  # [BLOCK_M, BLOCK_P]
            dS = load_state(dstates, p, n, SIZES)  # [BLOCK_P, BLOCK_N]
            acc = tl.dot((x_j.to(tl.float32) * w).to(DTYPE), dS.to(DTYPE), acc, input_precision=PRECISION)
        x += x_strides[2]
        dt += nchunks * SIZES.chunk
        dA_cumsum += nchunks * SIZES.chunk
        dstates += SIZES.headdim * SIZES.dstate
    dB_parts += split * part_stride + ((b * seqlen + token) * SIZES.ngroups + g) * SIZES.dstate
    tl.store(dB_parts + offs_j[:, None] * (SIZES.ngroups * SIZES.dstate) + n[None, :], acc,
             mask=(offs_j < rows)[:, None] & (n < SIZES.dstate)[None, :])


def chunk_state_dB(i: SSDInputs, dt: Tensor, dA_cumsum: Tensor, dstates: Tensor, options: Options) -> Tensor:
    """Returns the part of dB that comes through the states, as partial sums over splits of the heads."""
    config = CONFIGS.pick(i)
    tiles = i.chunk_size // config["BLOCK_M"] * cdiv(i.dstate, config["BLOCK_N"])
    programs = tiles * i.ngroups * i.nchunks * i.batch
    splits = head_splits(i, programs)
    dB_parts = torch.empty(splits, *i.B.shape, device=i.x.device, dtype=torch.float32)
    launch(
        chunk_state_dB_kernel, programs * splits,
        i.x, dt, dA_cumsum, i.seq_idx, dstates, dB_parts, i.x.stride(), i.seqlen, i.nchunks, dB_parts.stride(0), get_sizes(i),
        splits, options.precision, **config.launch)
    return dB_parts
