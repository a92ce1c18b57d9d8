"""Device functions that several kernels share."""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def decay(exponent):
    """exp(exponent) for an exponent that is <= 0 but for rounding: clamped, and one instruction through exp2. NaN stays NaN."""
    return tl.math.exp2(tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL) * LOG2E)


@triton.jit
def product(a, b):
    """a * b, to be summed over lanes that then hold the sum alike.

    A bare product is contracted with the sum's first addition, fma(a, b, what another lane has), in which each of two lanes
    rounds the other's product alone: they would disagree in the last bit, and it would be left to chance which one is stored.
    """
    return a * b + 0.0


@triton.jit
def sigmoid(v):
    return 1.0 / (1.0 + tl.exp(-v))


@triton.jit
def softplus(v):
    """log(1 + exp(v)) to fp32 accuracy, also where exp(v) is far below 1; v itself from 20 on, as torch has it.

    log(1 + e) = log(u) e / (u - 1) with u = 1 + e as rounded (Kahan): the rounding of u cancels.
    """
    e = tl.exp(tl.minimum(v, 20.0))
    u = 1.0 + e
    small = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(v <= 20.0, small, v)


@triton.jit
def unpack_program(ntiles, nheads, nchunks):
    """(tile, head, chunk, batch) of this program in a one-dimensional grid, see `unpack`."""
    return unpack(tl.program_id(0), ntiles, nheads, nchunks)


@triton.jit
def unpack(number, ntiles, nheads, nchunks):
    """(tile, head, chunk, batch) of a piece of work by its number; tiles of one head are neighbours, then heads.

    Heads of a group run close together and so find its B, C and CB in L2. All but the tile are int64, for offsets.
    """
    tile, number = number % ntiles, number // ntiles
    head, number = number % nheads, number // nheads
    return tile, tl.cast(head, tl.int64), tl.cast(number % nchunks, tl.int64), tl.cast(number // nchunks, tl.int64)


@triton.jit
def chunk_offset(strides, b, token, head):
    """Offset of a chunk's first token, of one head or group, in a tensor (batch, seqlen, heads or groups, channels)."""
    return b * strides[0] + token * strides[1] + head * strides[2]


@triton.jit
def split_heads(slot, HEADS: tl.constexpr, SPLITS: tl.constexpr):
    """(group, split, first head in the group, number of heads) where SPLITS programs share the HEADS heads of a group."""
    EACH: tl.constexpr = (HEADS + SPLITS - 1) // SPLITS
    group, split = slot // SPLITS, slot % SPLITS
    first = split * EACH
    return group, split, first, tl.maximum(tl.minimum(EACH, HEADS - first), 0).to(tl.int32)


@triton.jit
def document_before(seq_idx, b, c, seqlen, CHUNK: tl.constexpr):
    """Document of the token before chunk c; 0 before the first."""
    return tl.load(seq_idx + b * seqlen + c * CHUNK - 1, mask=c > 0, other=0)


@triton.jit
def document_at_end(seq_idx, b, c, seqlen, CHUNK: tl.constexpr):
    """Document of the last token of chunk c."""
    return tl.load(seq_idx + b * seqlen + tl.minimum((c + 1) * CHUNK, seqlen) - 1)


@triton.jit
def causal(offs_i, offs_j, seq_idx, rows, TRANSPOSED: tl.constexpr):
    """m(j, i) and j <= i < rows: a tile [i, j] of booleans, or [j, i].

    seq_idx points at the chunk's first token, or is None.
    """
    if TRANSPOSED:
        i, j = offs_i[None, :], offs_j[:, None]
    else:
        i, j = offs_i[:, None], offs_j[None, :]
    mask = (i >= j) & (i < rows)
    if seq_idx is not None:
        # j past the end is masked by i < rows
        mask = mask & (tl.load(seq_idx + i, mask=i < rows, other=-1) == tl.load(seq_idx + j, mask=j < rows, other=-1))
    return mask
