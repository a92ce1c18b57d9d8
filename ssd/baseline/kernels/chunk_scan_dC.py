"""chunk_scan_dC, first sum of equation (16): what the states add to dC, summed over the heads of a group; and r of (20).

Reads dy (batch, seqlen, nheads, headdim), C (batch, seqlen, ngroups, dstate), any strides; dA_cumsum (batch, nheads,
nchunks, chunk_size) fp32; prev_states (batch, nchunks, nheads, headdim, dstate). Writes dC as partial sums over
splits of a group's heads, (nsplits, batch, seqlen, ngroups, dstate) fp32, for bmm_bwd to complete, and r as partial
sums over tiles of dstate, (ntiles, batch, nheads, nchunks, chunk_size) fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import cdiv
from ...kernels.device import chunk_offset, document_before, split_heads, unpack_program
from ...runtime.launch import launch
from ...runtime.tuning import ConfigSpace, head_splits
from ...types import Options, SSDInputs
from .chunk_state import weights_from_start

CONFIGS = ConfigSpace(
    "chunk_scan_dC",
    axes={"BLOCK_M": "chunk_size", "BLOCK_N": "dstate", "BLOCK_P": "headdim"},
    entries=((64, 128, 64, 4, 3), (64, 64, 64, 4, 3), (128, 64, 64, 4, 3), (128, 128, 64, 8, 3), (64, 128, 64, 8, 3),
             (64, 128, 64, 4, 4), (64, 128, 64, 4, 2), (128, 128, 64, 8, 2)),
    staged=(("BLOCK_M", "BLOCK_P"), ("BLOCK_P", "BLOCK_N")),
)


@triton.jit
def chunk_scan_dC_kernel(dy, dy_strides, C, C_strides, dA_cumsum, seq_idx, prev_states, dC_parts, r_tiles, seqlen, nchunks,
                         part_stride, r_stride, NHEADS: tl.constexpr, NGROUPS: tl.constexpr, HEADDIM: tl.constexpr,
                         DSTATE: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
                         BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr):
    DTYPE: tl.constexpr = dy.dtype.element_ty
    NTILES_N: tl.constexpr = (DSTATE + BLOCK_N - 1) // BLOCK_N
    HEADS: tl.constexpr = NHEADS // NGROUPS
    tile, slot, c, b = unpack_program(CHUNK // BLOCK_M * NTILES_N, NGROUPS * SPLITS, nchunks)
    g, split, head, count = split_heads(slot, HEADS, SPLITS)
    head += g * HEADS
    token, first = c * CHUNK, tile // NTILES_N * BLOCK_M
    rows = tl.minimum(CHUNK, seqlen - token).to(tl.int32)
    offs_i, n = first + tl.arange(0, BLOCK_M), tile % NTILES_N * BLOCK_N + tl.arange(0, BLOCK_N)
    in_i, in_n = offs_i < rows, n < DSTATE
    document = 0
    if seq_idx is not None:
        document = document_before(seq_idx, b, c, seqlen, CHUNK)
        seq_idx += b * seqlen + token
    dy += chunk_offset(dy_strides, b, token, head)
    per_head = ((b * NHEADS + head) * nchunks + c) * CHUNK
    dA_cumsum += per_head
    r_tiles += (tile % NTILES_N).to(tl.int64) * r_stride + per_head
    prev_states += ((b * nchunks + c) * NHEADS + head) * HEADDIM * DSTATE
    C += chunk_offset(C_strides, b, token, g)
    C_i = tl.load(C + offs_i[:, None] * C_strides[1] + n[None, :] * C_strides[3], mask=in_i[:, None] & in_n[None, :],
                  other=0.0)

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(count):
        w = weights_from_start(offs_i, dA_cumsum, seq_idx, rows, document)[:, None]
        dC_h = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, HEADDIM, BLOCK_P):
            p = start + tl.arange(0, BLOCK_P)
            dy_i = tl.load(dy + offs_i[:, None] * dy_strides[1] + p[None, :] * dy_strides[3],
                           mask=in_i[:, None] & (p < HEADDIM)[None, :], other=0.0)
            H = tl.load(prev_states + p[:, None] * DSTATE + n[None, :], mask=(p < HEADDIM)[:, None] & in_n[None, :], other=0.0)
            dC_h = tl.dot((dy_i.to(tl.float32) * w).to(DTYPE), H.to(DTYPE), dC_h, input_precision=PRECISION)
        tl.store(r_tiles + offs_i, tl.sum(dC_h * C_i.to(tl.float32), 1))
        acc += dC_h
        dy += dy_strides[2]
        dA_cumsum += nchunks * CHUNK
        r_tiles += nchunks * CHUNK
        prev_states += HEADDIM * DSTATE
    dC_parts += split * part_stride + ((b * seqlen + token) * NGROUPS + g) * DSTATE
    tl.store(dC_parts + offs_i[:, None] * (NGROUPS * DSTATE) + n[None, :], acc, mask=in_i[:, None] & in_n[None, :])


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
        dy, dy.stride(), i.C, i.C.stride(), dA_cumsum, i.seq_idx, prev_states, dC_parts, r_tiles, i.seqlen, i.nchunks,
        dC_parts.stride(0), r_tiles.stride(0), i.nheads, i.ngroups, i.headdim, i.dstate, i.chunk_size, splits,
        options.precision, **config.launch)
    return dC_parts, r_tiles
