"""part_sum: what a part of a sequence adds to the state after it, or to the gradient of the state before it.

It is (7), or (13), of docs/ssd.md, summed over all chunks of the part:

    end = sum_c exp(A of the chunks behind c) S_c,    start = sum_c exp(A of the chunks before c) dH_c

Reads u and v, which are x (batch, seqlen, nheads, headdim) and B (batch, seqlen, ngroups, dstate), or dy and C, any strides; dt
and dA_cumsum (batch, nheads, nchunks, chunk_size) fp32. Writes total, end or start, (batch, nheads, headdim, dstate) fp32; and
with the end the decays of the part, (batch, nheads) fp32.

A chunk from which nothing is left, because its decay is 0 in fp32 or another document lies between, is not read. Most heads
forget within a few chunks; some remember the whole part. So a head gets a program for every 1,024 tokens that it remembers, at
most nsums, which share its chunks evenly. Each writes one of sums (batch, nsums, nheads, headdim, dstate) fp32, and part_total
adds up those that were written, in their order. Chunks and programs are counted in 32 bits, in which a division is no call.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...baseline.kernels.chunk_state import CONFIGS, add_tokens, count_state_tiles, store_state, unpack_state_tile
from ...kernels.arguments import COUNTS, Strides, cdiv, get_sizes
from ...kernels.device import chunk_offset, decay, state_offset, step_offset, unpack_program
from ...runtime.launch import launch
from ...types import Options, SSDInputs

MOST_PROGRAMS = 4096  # of one launch: few of them have chunks to read
LEAST_TOKENS = 1024  # that a program reads at least, if its head remembers that many
_TOTALS = tl.constexpr(128)  # that are loaded at once
FORGOTTEN = tl.constexpr(-128.0)  # A of chunks behind which a state is 0 in fp32, however A is rounded: exp(-104) is
_BLOCK = 1024  # of part_total


@triton.jit
def first_token(n, nchunks, TO_END: tl.constexpr, SIZES: tl.constexpr):
    """That of chunk n, counted from the end or from the start, int64."""
    return tl.cast(nchunks - 1 - n if TO_END else n, tl.int64) * SIZES.chunk


@triton.jit
def load_totals(dA_cumsum, n, last, nchunks, TO_END: tl.constexpr, SIZES: tl.constexpr):
    """A of chunks n, those before `last`; 0 for others."""
    return tl.load(dA_cumsum + first_token(n, nchunks, TO_END, SIZES) + SIZES.chunk - 1, mask=n < last, other=0.0)


@triton.jit
def sum_totals(dA_cumsum, last, nchunks, TO_END: tl.constexpr, SIZES: tl.constexpr):
    """A of the chunks before `last` together."""
    total = tl.full([], 0.0, tl.float32)
    for first in range(0, last, _TOTALS):
        total += tl.sum(load_totals(dA_cumsum, first + tl.arange(0, _TOTALS), last, nchunks, TO_END, SIZES))
    return total


@triton.jit
def find_share(number, programs, remembered):
    """The first chunk of this program, and the one behind its last: all have as many, or one more. No product can overflow."""
    each, more = remembered // programs, remembered % programs
    begin = number * each + tl.minimum(number, more)
    return begin, begin + each + (number < more).to(tl.int32)


@triton.jit
def count_remembered(dA_cumsum, seq_idx, document, seqlen, nchunks, TO_END: tl.constexpr, SIZES: tl.constexpr):
    """How many chunks, counted from the end or the start, still contribute: decay not 0, same document."""
    found, first = 0, 0
    between = tl.full([], 0.0, tl.float32)
    while (first < nchunks) & (decay(between) != 0.0):
        n = first + tl.arange(0, _TOTALS)
        totals = load_totals(dA_cumsum, n, nchunks, nchunks, TO_END, SIZES)
        left = (decay(between + tl.cumsum(totals, 0) - totals) != 0.0) & (n < nchunks)
        if seq_idx is not None:
            nearest = first_token(n, nchunks, TO_END, SIZES)
            if TO_END:
                nearest = tl.minimum(nearest + SIZES.chunk, seqlen) - 1
            left &= tl.load(seq_idx + nearest, mask=n < nchunks, other=-1) == document
        found += tl.sum(left.to(tl.int32))
        between += tl.sum(totals)
        first += _TOTALS
    return found


@triton.jit(do_not_specialize=COUNTS)
def part_sum_kernel(u, v, dt, dA_cumsum, seq_idx, sums, nsummed, strides, seqlen, nchunks, nsums, TO_END: tl.constexpr,
                    SIZES: tl.constexpr, LEAST_CHUNKS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_P: tl.constexpr,
                    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    offs_p, offs_n, h, which, b = unpack_state_tile(nsums, SIZES, BLOCK_P, BLOCK_N)
    dA_cumsum += step_offset(b, h, 0, nchunks, SIZES)
    if sum_totals(dA_cumsum, tl.minimum(which * LEAST_CHUNKS, nchunks), nchunks, TO_END, SIZES) < FORGOTTEN:
        return  # as most programs do: nothing is left of the chunks from there on
    document = 0  # before the start: documents are numbered from the one that goes on
    if seq_idx is not None:
        seq_idx += b * seqlen
        if TO_END:
            document = tl.load(seq_idx + seqlen - 1)
    remembered = count_remembered(dA_cumsum, seq_idx, document, seqlen, nchunks, TO_END, SIZES)
    programs = tl.minimum(tl.maximum(tl.cdiv(remembered, LEAST_CHUNKS), 1), nsums)
    tl.store(nsummed + b * SIZES.nheads + h, programs)  # every program that comes here stores the same number for its head
    if which < programs:
        begin, end = find_share(which.to(tl.int32), programs, remembered)
        between = sum_totals(dA_cumsum, begin, nchunks, TO_END, SIZES)  # A of the chunks up to the end, or the start
        u += chunk_offset(strides.x, b, 0, h)
        v += chunk_offset(strides.B, b, 0, h // (SIZES.nheads // SIZES.ngroups))
        dt += step_offset(b, h, 0, nchunks, SIZES)
        acc = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
        BLOCKS: tl.constexpr = (SIZES.chunk + BLOCK_K - 1) // BLOCK_K  # of a chunk
        for step in range(begin * BLOCKS, end * BLOCKS):
            n, k = step // BLOCKS, step % BLOCKS * BLOCK_K + tl.arange(0, BLOCK_K)
            token = first_token(n, nchunks, TO_END, SIZES)
            rows = tl.minimum(SIZES.chunk, seqlen - token).to(tl.int32)
            at = None if seq_idx is None else seq_idx + token
            acc = add_tokens(acc, k, u + token * strides.x[1], strides.x, v + token * strides.B[1], strides.B, dt + token,
                             dA_cumsum + token, at, document, rows, between, offs_p, offs_n, TO_END, SIZES, PRECISION)
            if step % BLOCKS == BLOCKS - 1:
                between += tl.load(dA_cumsum + token + SIZES.chunk - 1)
        store_state(sums + state_offset(b, which, h, nsums, SIZES), offs_p, offs_n, acc, SIZES)


@triton.jit(do_not_specialize=COUNTS)
def part_total_kernel(sums, nsummed, dA_cumsum, total, decays, nchunks, nsums, SIZES: tl.constexpr, BLOCK: tl.constexpr):
    STATE: tl.constexpr = SIZES.headdim * SIZES.dstate
    block, h, _, b = unpack_program((STATE + BLOCK - 1) // BLOCK, SIZES.nheads, 1)
    head, offs = b * SIZES.nheads + h, block * BLOCK + tl.arange(0, BLOCK)
    if decays is not None and block == 0:
        dA_cumsum += step_offset(b, h, 0, nchunks, SIZES)
        tl.store(decays + head, decay(sum_totals(dA_cumsum, nchunks, nchunks, False, SIZES)))
    sums += state_offset(b, 0, h, nsums, SIZES)
    acc = tl.zeros([BLOCK], tl.float32)
    for s in range(tl.load(nsummed + head)):
        acc += tl.load(sums + tl.cast(s, tl.int64) * SIZES.nheads * STATE + offs, mask=offs < STATE, other=0.0)
    tl.store(total + head * STATE + offs, acc, mask=offs < STATE)


def part_sum(i: SSDInputs, u: Tensor, v: Tensor, dt: Tensor, dA_cumsum: Tensor, total: Tensor, decays: Tensor | None,
             options: Options) -> None:
    """Writes total, the end and the decays; or the start, if decays is None. i: of it, sizes and seq_idx are read."""
    config, sizes = CONFIGS.pick(i), get_sizes(i)
    programs, least = count_state_tiles(i, config) * i.nheads * i.batch, cdiv(LEAST_TOKENS, i.chunk_size)
    nsums = max(1, min(cdiv(i.nchunks, least), MOST_PROGRAMS // programs))
    sums = torch.empty(i.batch, nsums, i.nheads, i.headdim, i.dstate, device=u.device, dtype=torch.float32)
    nsummed = torch.empty(i.batch, i.nheads, device=u.device, dtype=torch.int32)
    launch(
        part_sum_kernel, programs * nsums, u, v, dt, dA_cumsum, i.seq_idx, sums, nsummed, Strides(x=u.stride(), B=v.stride()),
        i.seqlen, i.nchunks, nsums, decays is not None, sizes, least, options.precision, **config.launch)
    blocks = i.batch * i.nheads * cdiv(i.headdim * i.dstate, _BLOCK)
    launch(part_total_kernel, blocks, sums, nsummed, dA_cumsum, total, decays, i.nchunks, nsums, sizes, _BLOCK)
