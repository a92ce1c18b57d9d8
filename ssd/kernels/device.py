"""Device functions that several kernels share."""

import triton
import triton.language as tl

from .. import types

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LEAST_Z: tl.constexpr = tl.constexpr(types.LEAST_Z)


@triton.jit
def decay(exponent, SCALED: tl.constexpr = False):
    """exp(exponent), or with SCALED 2^exponent, for an exponent that is <= 0 but for rounding: clamped. NaN stays NaN.

    Either is one instruction. SCALED saves the product by log2(e), which `scale_exponent` then takes before differences are.
    """
    exponent = tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.math.exp2(exponent if SCALED else exponent * LOG2E)


@triton.jit
def scale_exponent(dA, SCALED: tl.constexpr):
    """A cumulative sum in the units that `decay` takes."""
    return dA * LOG2E if SCALED else dA


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
def keep_from_zero(z):
    """z, with LEAST_Z for its size where that is less: `SSDSaved.out` says why."""
    size = tl.maximum(tl.abs(z), LEAST_Z, propagate_nan=tl.PropagateNan.ALL).to(tl.int32, bitcast=True)
    return (size | z.to(tl.int32, bitcast=True) & -0x80000000).to(tl.float32, bitcast=True)


@triton.jit
def gate(z):
    """silu(z), and never 0 for want of a z."""
    z = keep_from_zero(z)
    return z * sigmoid(z)


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
def step_offset(b, h, c, nchunks, SIZES: tl.constexpr):
    """Offset of chunk c in dt and dA_cumsum (batch, nheads, nchunks, chunk_size)."""
    return ((b * SIZES.nheads + h) * nchunks + c) * SIZES.chunk


@triton.jit
def state_offset(b, c, h, nchunks, SIZES: tl.constexpr):
    """Offset of a chunk's state in states (batch, nchunks, nheads, headdim, dstate)."""
    return ((b * nchunks + c) * SIZES.nheads + h) * SIZES.headdim * SIZES.dstate


@triton.jit
def CB_offset(b, c, g, nchunks, SIZES: tl.constexpr):
    """Offset of a chunk's tile in CB (batch, nchunks, ngroups, chunk_size, chunk_size)."""
    return ((b * nchunks + c) * SIZES.ngroups + g) * SIZES.chunk * SIZES.chunk


@triton.jit
def split_heads(slot, HEADS: tl.constexpr, SPLITS: tl.constexpr):
    """(group, split, first head in the group, number of heads) where SPLITS programs share the HEADS heads of a group."""
    EACH: tl.constexpr = (HEADS + SPLITS - 1) // SPLITS
    group, split = slot // SPLITS, slot % SPLITS
    first = split * EACH
    return group, split, first, tl.maximum(tl.minimum(EACH, HEADS - first), 0).to(tl.int32)


@triton.jit
def load_tokens(t, strides, offs_m, offs_c, rows, WIDTH: tl.constexpr):
    """Tokens offs_m < rows and channels offs_c < WIDTH of one head or group: [M, C], 0 outside. t points at token 0 of it."""
    inside = (offs_m < rows)[:, None] & (offs_c < WIDTH)[None, :]
    return tl.load(t + (offs_m[:, None] * strides[1] + offs_c[None, :] * strides[3]), mask=inside, other=0.0)


@triton.jit
def load_tokens_t(t, strides, offs_m, offs_c, rows, WIDTH: tl.constexpr):
    """The same, transposed: [C, M]."""
    inside = (offs_m < rows)[None, :] & (offs_c < WIDTH)[:, None]
    return tl.load(t + (offs_m[None, :] * strides[1] + offs_c[:, None] * strides[3]), mask=inside, other=0.0)


@triton.jit
def store_tokens(t, strides, offs_m, offs_c, rows, values, WIDTH: tl.constexpr):
    """`values` [M, C] to where `load_tokens` would read them, in the dtype of t."""
    inside = (offs_m < rows)[:, None] & (offs_c < WIDTH)[None, :]
    at = offs_m[:, None] * strides[1] + offs_c[None, :] * strides[3]
    tl.store(t + at, values.to(t.dtype.element_ty), mask=inside)


@triton.jit
def load_state(states, offs_p, offs_n, SIZES: tl.constexpr):
    """A tile [P, N] of a contiguous state (headdim, dstate), 0 outside."""
    inside = (offs_p < SIZES.headdim)[:, None] & (offs_n < SIZES.dstate)[None, :]
    return tl.load(states + (offs_p[:, None] * SIZES.dstate + offs_n[None, :]), mask=inside, other=0.0)


@triton.jit
def load_state_t(states, offs_p, offs_n, SIZES: tl.constexpr):
    """The same, transposed: [N, P]."""
    at, inside = state_tile_t(offs_p, offs_n, SIZES)
    return tl.load(states + at, mask=inside, other=0.0)


@triton.jit
def state_tile_t(offs_p, offs_n, SIZES: tl.constexpr):
    """Offsets of a tile [N, P] in a contiguous state (headdim, dstate), and which of them are inside."""
    inside = (offs_n < SIZES.dstate)[:, None] & (offs_p < SIZES.headdim)[None, :]
    return offs_p[None, :] * SIZES.dstate + offs_n[:, None], inside


@triton.jit
def document_before(seq_idx, token):
    """Document of the token before `token` of a row; 0 before the first. seq_idx points at the row."""
    return tl.load(seq_idx + token - 1, mask=token > 0, other=0)


@triton.jit
def keep_document(values, seq_idx, k, in_k, document):
    """`values` [K] where token k is of `document`, else 0; all of them if seq_idx is None. seq_idx points at token 0 of k."""
    if seq_idx is not None:
        values = tl.where(tl.load(seq_idx + k, mask=in_k, other=-1) == document, values, 0.0)
    return values


@triton.jit
def decays_to_end(k, dt, dA_cumsum, seq_idx, end, document):
    """m(k, end) exp(A_end - A_k) [K], times dt_k unless dt is None, for tokens k of a chunk, 0 past the end.

    dt, dA_cumsum and seq_idx point at the chunk's first token; document is that of token `end`.
    """
    in_k = k <= end
    w = decay(tl.load(dA_cumsum + end) - tl.load(dA_cumsum + k, mask=in_k, other=0.0))
    if dt is None:
        w = tl.where(in_k, w, 0.0)
    else:
        w *= tl.load(dt + k, mask=in_k, other=0.0)
    return keep_document(w, seq_idx, k, in_k, document)


@triton.jit
def decays_from_start(k, dA_cumsum, seq_idx, rows, document):
    """m(prev, k) exp(A_k) [K] for tokens k of a chunk; `document` is that of the token before the chunk."""
    in_k = k < rows
    return keep_document(decay(tl.load(dA_cumsum + k, mask=in_k, other=0.0)), seq_idx, k, in_k, document)


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


@triton.jit
def pair_weights(CB_ij, A_i, dt, dA_cumsum, offs_i, j, seq_idx, rows, SCALED: tl.constexpr = False):
    """m(j, i) CB_ij exp(A_i - A_j) dt_j for j <= i < rows, else 0: [i, j]. Pointers at the chunk's first token; A_i as `decay`
    takes it.
    """
    A_j = scale_exponent(tl.load(dA_cumsum + j), SCALED)
    weights = CB_ij * decay(A_i[:, None] - A_j[None, :], SCALED) * tl.load(dt + j)[None, :]
    # selected, not multiplied by 0: above the diagonal CB may never have been written
    return tl.where(causal(offs_i, j, seq_idx, rows, False), weights, 0.0)


@triton.jit
def load_skip(D, strides, h, offs_p, HEADDIM: tl.constexpr):
    """D (nheads,) as a number, which takes one register, or (nheads, headdim) as [1, P]; fp32."""
    if len(strides) == 1:
        skip = tl.load(D + h * strides[0]).to(tl.float32)
    else:
        at = h * strides[0] + offs_p.to(tl.int64) * strides[1]
        skip = tl.load(D + at, mask=offs_p < HEADDIM, other=0.0).to(tl.float32)[None, :]
    return skip
