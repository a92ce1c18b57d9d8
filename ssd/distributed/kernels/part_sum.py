"""part_sum: what a part of a sequence adds to the state after it, or to the gradient of the state before it.

It is (7), or (13), of docs/ssd.md, summed over all chunks of the part:

    end = sum_c exp(A of the chunks behind c) S_c,    start = sum_c exp(A of the chunks before c) dH_c

Reads u and v, which are x (batch, seqlen, nheads, headdim) and B (batch, seqlen, ngroups, dstate), or dy and C, any strides; dt
and dA_cumsum (batch, nheads, nchunks, chunk_size) fp32. A chunk from which nothing is left, because its decay is 0 in fp32 or
another document lies between, is not read. Writes sums (batch, nsums, nheads, headdim, dstate) fp32, to be added up. Each is of
every nsums-th chunk, so that all programs have their share of those that are read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...baseline.kernels.chunk_state import CONFIGS, count_state_tiles, store_state, unpack_state_tile, weighted_outer
from ...kernels.arguments import COUNTS, Strides, cdiv, get_sizes
from ...kernels.device import chunk_offset, decay, state_offset, step_offset
from ...runtime.launch import launch
from ...types import Options, SSDInputs

PROGRAMS = 1024  # that fill any GPU, while the sums that they write stay few
_TOTALS = tl.constexpr(128)  # that are loaded at once


@triton.jit(do_not_specialize=COUNTS)
def part_sum_kernel(u, v, dt, dA_cumsum, seq_idx, sums, strides, seqlen, nchunks, nsums, TO_END: tl.constexpr,
                    SIZES: tl.constexpr, PRECISION: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
                    BLOCK_K: tl.constexpr):
    offs_p, offs_n, h, which, b = unpack_state_tile(nsums, SIZES, BLOCK_P, BLOCK_N)
    dA_cumsum += step_offset(b, h, 0, nchunks, SIZES)
    document = 0  # before the start: documents are numbered from the one that goes on
    if seq_idx is not None:
        seq_idx += b * seqlen
        if TO_END:
            document = tl.load(seq_idx + seqlen - 1)
    acc = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    between = tl.full([], 0.0, tl.float32)  # A of the chunks between this one and the end, or the start
    summed = 0
    for n in range(tl.cast(which, tl.int32), nchunks, nsums):  # chunks are counted from the end, or the start
        for first in range(summed, n, _TOTALS):
            other = first + tl.arange(0, _TOTALS)
            other_c = tl.cast(nchunks - 1 - other if TO_END else other, tl.int64)
            between += tl.sum(tl.load(dA_cumsum + other_c * SIZES.chunk + SIZES.chunk - 1, mask=other < n, other=0.0))
        summed = n
        c = tl.cast(nchunks - 1 - n if TO_END else n, tl.int64)
        token = c * SIZES.chunk
        rows = tl.minimum(SIZES.chunk, seqlen - token).to(tl.int32)
        left, at = decay(between), None
        if seq_idx is not None:
            at = seq_idx + token
            nearest = tl.load(at + (rows - 1 if TO_END else 0))
            left = tl.where(nearest == document, left, 0.0)
        if left != 0.0:
            acc += left * weighted_outer(
                u + chunk_offset(strides.x, b, token, h), strides.x,
                v + chunk_offset(strides.B, b, token, h // (SIZES.nheads // SIZES.ngroups)), strides.B,
                dt + step_offset(b, h, c, nchunks, SIZES), dA_cumsum + token, at, document, rows, offs_p, offs_n, TO_END, SIZES,
                BLOCK_K, PRECISION)
    store_state(sums + state_offset(b, which, h, nsums, SIZES), offs_p, offs_n, acc, SIZES)


def part_sum(i: SSDInputs, u: Tensor, v: Tensor, dt: Tensor, dA_cumsum: Tensor, to_end: bool, options: Options) -> Tensor:
    """Returns end, or start, (batch, nheads, headdim, dstate) fp32. i: of it, sizes and seq_idx are read."""
    config = CONFIGS.pick(i)
    programs = count_state_tiles(i, config) * i.nheads * i.batch
    nsums = min(i.nchunks, cdiv(PROGRAMS, programs))
    sums = torch.empty(i.batch, nsums, i.nheads, i.headdim, i.dstate, device=u.device, dtype=torch.float32)
    launch(
        part_sum_kernel, programs * nsums, u, v, dt, dA_cumsum, i.seq_idx, sums, Strides(x=u.stride(), B=v.stride()), i.seqlen,
        i.nchunks, nsums, to_end, get_sizes(i), options.precision, **config.launch)
    return sums.sum(1)
