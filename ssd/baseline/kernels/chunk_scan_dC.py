"""chunk_scan_dC, first sum of equation (16): what the states add to dC, summed over the heads of a group; and r of (20).

    dC_i += sum_heads e_i,  r_i = e_i . C_i of each head,  with e_i = m(prev, i) exp(A_i) dy_i H

Reads dy (batch, seqlen, nheads, headdim), C (batch, seqlen, ngroups, dstate), any strides; dA_cumsum (batch, nheads,
nchunks, chunk_size) fp32; prev_states, H, (batch, nchunks, nheads, headdim, dstate). Writes dC as partial sums over
splits of a group's heads, (nsplits, batch, seqlen, ngroups, dstate) fp32, for bmm_bwd to complete, and r as partial
sums over tiles of dstate, (ntiles, batch, nheads, nchunks, chunk_size) fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import COUNTS, Strides, cdiv, get_sizes
from ...kernels.device import (
    chunk_offset,
    decays_from_start,
    document_before,
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
    "chunk_scan_dC",
    axes={"BLOCK_M": "chunk_size", "BLOCK_N": "dstate", "BLOCK_P": "headdim"},
    entries=((64, 128, 64, 4, 3), (64, 64, 64, 4, 3), (128, 64, 64, 4, 3), (128, 128, 64, 8, 3), (64, 128, 64, 8, 3),
             (64, 128, 64, 4, 4), (64, 128, 64, 4, 2), (128, 128, 64, 8, 2)),
    staged=(("BLOCK_M", "BLOCK_P"), ("BLOCK_P", "BLOCK_N")),
)


@triton.jit(do_not_specialize=COUNTS)
def chunk_scan_dC_kernel(dy, C, dA_cumsum, seq_idx, prev_states, dC_parts, r_tiles, strides, seqlen, nchunks, part_stride,
                         r_stride, SIZES: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
                         BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr):
    DTYPE: tl.constexpr = dy.dtype.element_ty
    NTILES_N: tl.constexpr = (SIZES.dstate + BLOCK_N - 1) // BLOCK_N
    HEADS: tl.constexpr = SIZES.nheads // SIZES.ngroups
    tile, slot, c, b = unpack_program(SIZES.chunk // BLOCK_M * NTILES_N, SIZES.ngroups * SPLITS, nchunks)
    g, split, head, count = split_heads(slot, HEADS, SPLITS)
    head += g * HEADS
    token, first = c * SIZES.chunk, tile // NTILES_N * BLOCK_M
    rows = tl.minimum(SIZES.chunk, seqlen - token).to(tl.int32)
    offs_i, n = first + tl.arange(0, BLOCK_M), tile % NTILES_N * BLOCK_N + tl.arange(0, BLOCK_N)
    document = 0
    if seq_idx is not None:
        document = document_before(seq_idx + b * seqlen, token)
        seq_idx += b * seqlen + token
    dy += chunk_offset(strides.dy, b, token, head)
    dA_cumsum += step_offset(b, head, c, nchunks, SIZES)
    r_tiles += (tile % NTILES_N).to(tl.int64) * r_stride + step_offset(b, head, c, nchunks, SIZES)
    prev_states += state_offset(b, c, head, nchunks, SIZES)
    C_i = load_tokens(C + chunk_offset(strides.C, b, token, g), strides.C, offs_i, n, rows, SIZES.dstate)

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(count):
        w = decays_from_start(offs_i, dA_cumsum, seq_idx, rows, document)[:, None]
        e_i = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, SIZES.headdim, BLOCK_P):
            p = start + tl.arange(0, BLOCK_P)
            dy_i = load_tokens(dy, strides.dy, offs_i, p, rows, SIZES.headdim)  # [BLOCK_M, BLOCK_P]
            H = load_state(prev_states, p, n, SIZES)  # [BLOCK_P, BLOCK_N]
            e_i = tl.dot((dy_i.to(tl.float32) * w).to(DTYPE), H.to(DTYPE), e_i, input_precision=PRECISION)
        tl.store(r_tiles + offs_i, tl.sum(e_i * C_i.to(tl.float32), 1))
        acc += e_i
        dy += strides.dy[2]
        dA_cumsum += nchunks * SIZES.chunk
        r_tiles += nchunks * SIZES.chunk
        prev_states += SIZES.headdim * SIZES.dstate
    dC_parts += split * part_stride + ((b * seqlen + token) * SIZES.ngroups + g) * SIZES.dstate
    tl.store(dC_parts + offs_i[:, None] * (SIZES.ngroups * SIZES.dstate) + n[None, :], acc,
             mask=(offs_i < rows)[:, None] & (n < SIZES.dstate)[None, :])


def chunk_scan_dC(i: SSDInputs, dy: Tensor, dA_cumsum: Tensor, prev_states: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Returns the part of dC that comes through the states, as partial sums over splits of the heads, and those of r."""
    config = CONFIGS.pick(i)
    ntiles = cdiv(i.dstate, config["BLOCK_N"])
    r_tiles = torch.empty(ntiles, *dA_cumsum.shape, device=i.x.device, dtype=torch.float32)
    programs = i.chunk_size // config["BLOCK_M"] * ntiles * i.ngroups * i.nchunks * i.batch
    splits = head_splits(i, programs)
    dC_parts = torch.empty(splits, *i.C.shape, device=i.x.device, dtype=torch.float32)
    launch(
        chunk_scan_dC_kernel, programs * splits,
        dy, i.C, dA_cumsum, i.seq_idx, prev_states, dC_parts, r_tiles, Strides(C=i.C.stride(), dy=dy.stride()), i.seqlen,
        i.nchunks, dC_parts.stride(0), r_tiles.stride(0), get_sizes(i), splits, options.precision, **config.launch)
    return dC_parts, r_tiles
