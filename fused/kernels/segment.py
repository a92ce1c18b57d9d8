"""A segment of a sequence, block by block with the state in registers: equations (26) and (27) of docs/ssd.md.

    y_i = m(prev, i) exp(A_i) C_i H + sum_{j<=i} m(j, i) CB_ij exp(A_i - A_j) dt_j x_j + D x_i
    H  <- m(prev, last) exp(A_last) H + sum_j m(j, last) exp(A_last - A_j) dt_j B_j^T x_j

A block is BLOCK_M tokens. H is [BLOCK_N, BLOCK_P] fp32: the whole dstate, padded, and a tile of headdim. dt and dA_cumsum, A,
are fp32, contiguous (batch, nheads, seqlen rounded up); dA_cumsum restarts every CUMSUM tokens, a multiple of BLOCK_M.

The functions here know no schedule: kernels say which tokens a program takes, and from which state.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ssd.kernels.arguments import get_sizes
from ssd.kernels.device import (
    decay,
    document_before,
    gate,
    load_skip,
    load_tokens,
    scale_exponent,
    state_tile_t,
    store_tokens,
)
from ssd.types import Options, SSDInputs


class Form(NamedTuple):
    """What a kernel is compiled for, as one constexpr argument. Device functions of ssd take it as their `Sizes`."""

    nheads: int
    ngroups: int
    headdim: int
    dstate: int
    chunk: int
    exp2: bool
    precision: str


class Tokens(NamedTuple):
    """What a scan reads of each token, as pointers in a kernel; None for what is absent. Shapes are those of the public API."""

    x: object
    z: object
    B: object
    C: object
    D: object
    CB: object
    dt: object
    dA_cumsum: object
    seq_idx: object


def get_form(i: SSDInputs, options: Options) -> Form:
    return Form(*get_sizes(i), options.exp2, options.precision)


@triton.jit
def load_block(t, strides, token, offs_m, offs_c, seqlen, WIDTH: tl.constexpr):
    """Tokens token + offs_m of a row and channels offs_c of one head or group: [M, C], 0 outside. t points at its token 0."""
    return load_tokens(t + tl.cast(token, tl.int64) * strides[1], strides, offs_m, offs_c, seqlen - token, WIDTH)


@triton.jit
def store_block(t, strides, token, offs_m, offs_c, seqlen, values, WIDTH: tl.constexpr):
    """`values` [M, C] to where `load_block` would read them."""
    store_tokens(t + tl.cast(token, tl.int64) * strides[1], strides, offs_m, offs_c, seqlen - token, values, WIDTH)


@triton.jit
def block_decays(dA_cumsum, seq_idx, token, offs_m, seqlen, CUMSUM: tl.constexpr, FORM: tl.constexpr):
    """Of a block: A_i in units of `decay` and, with documents, m(prev, i) exp(A_i), m(i, last) exp(A_last - A_i), all [M], and
    m(prev, last) exp(A_last). dA_cumsum points at the head, seq_idx at the row.
    """
    BLOCK_M: tl.constexpr = offs_m.shape[0]
    A_i = scale_exponent(tl.load(dA_cumsum + token + offs_m), FORM.exp2)
    A_last = scale_exponent(tl.load(dA_cumsum + token + BLOCK_M - 1), FORM.exp2)
    if BLOCK_M < CUMSUM:
        before = scale_exponent(tl.load(dA_cumsum + token - 1, mask=token % CUMSUM != 0, other=0.0), FORM.exp2)
        A_i, A_last = A_i - before, A_last - before
    from_start, to_end, carried = decay(A_i, FORM.exp2), decay(A_last - A_i, FORM.exp2), decay(A_last, FORM.exp2)
    if seq_idx is not None:
        end = tl.minimum(token + BLOCK_M, seqlen) - 1
        own = tl.load(seq_idx + token + offs_m, mask=token + offs_m <= end, other=-1)
        before, last = document_before(seq_idx, token), tl.load(seq_idx + end)
        from_start = tl.where(own == before, from_start, 0.0)
        to_end = tl.where(own == last, to_end, 0.0)
        carried = tl.where(before == last, carried, 0.0)
    return A_i, from_start, to_end, carried


@triton.jit
def visible(seq_idx, token, offs_m, seqlen, TRANSPOSED: tl.constexpr):
    """j <= i and m(j, i) over one block: [i, j] of booleans, or [j, i]. seq_idx points at the row, or is None.

    `causal` masks rows past the end as well, which costs registers that the kernels here do not have; tokens there are zeros.
    """
    pairs = offs_m[:, None] <= offs_m[None, :] if TRANSPOSED else offs_m[:, None] >= offs_m[None, :]
    if seq_idx is not None:
        own = tl.load(seq_idx + token + offs_m, mask=token + offs_m < seqlen, other=-1)
        pairs &= own[:, None] == own[None, :]
    return pairs


@triton.jit
def add_to_state(state, x_j, B_j, weights, carried, FORM: tl.constexpr):
    """(27): carried H + sum_j weights_j B_j^T x_j."""
    weighted = (x_j.to(tl.float32) * weights[:, None]).to(x_j.dtype)
    return tl.dot(tl.trans(B_j).to(x_j.dtype), weighted, state * carried, input_precision=FORM.precision)  # [N, M] @ [M, P]


@triton.jit
def load_initial(initial_states, strides, b, h, offs_n, offs_p, FORM: tl.constexpr):
    """initial_states (batch, nheads, headdim, dstate), any strides, as [N, P] fp32; zeros for None."""
    if initial_states is None:
        state = tl.zeros([offs_n.shape[0], offs_p.shape[0]], tl.float32)
    else:
        at = offs_p.to(tl.int64)[None, :] * strides[2] + offs_n.to(tl.int64)[:, None] * strides[3]
        _, inside = state_tile_t(offs_p, offs_n, FORM)
        state = tl.load(initial_states + b * strides[0] + h * strides[1] + at, mask=inside, other=0.0).to(tl.float32)
    return state


@triton.jit
def store_prev_state(prev_states, state, token, offs_n, offs_p, FORM: tl.constexpr):
    """The state before `token`, if a chunk begins there; prev_states points at the head in the row's first chunk."""
    if token % FORM.chunk == 0:
        at, inside = state_tile_t(offs_p, offs_n, FORM)
        chunk = tl.cast(token // FORM.chunk, tl.int64) * FORM.nheads * FORM.headdim * FORM.dstate
        tl.store(prev_states + chunk + at, state.to(prev_states.dtype.element_ty), mask=inside)


@triton.jit
def scan_segment(state, first, end, b, h, offs_n, offs_p, tokens, prev_states, out, y, strides, seqlen, nchunks,
                 FORM: tl.constexpr, BLOCK_M: tl.constexpr):
    """(26), (27) and (5) over tokens [first, end): writes out, and y unless it is None; returns the state after them.

    dA_cumsum restarts every BLOCK_M tokens. CB (batch, blocks, ngroups, BLOCK_M, BLOCK_M) is read from memory, or computed
    here where it is None. prev_states (batch, nchunks, nheads, headdim, dstate), or None, gets the state before each chunk
    that begins here.
    """
    x, z, B, C, D, CB, dt, dA_cumsum, seq_idx = tokens
    DTYPE: tl.constexpr = x.dtype.element_ty
    g = h // (FORM.nheads // FORM.ngroups)
    nblocks = tl.cast(tl.cdiv(seqlen, BLOCK_M), tl.int64)
    x += b * strides.x[0] + h * strides.x[2]
    B += b * strides.B[0] + g * strides.B[2]
    C += b * strides.C[0] + g * strides.C[2]
    dt += (b * FORM.nheads + h) * nblocks * BLOCK_M
    dA_cumsum += (b * FORM.nheads + h) * nblocks * BLOCK_M
    out += (b * seqlen * FORM.nheads + h) * FORM.headdim
    if z is not None:
        z += b * strides.z[0] + h * strides.z[2]
    if y is not None:
        y += (b * seqlen * FORM.nheads + h) * FORM.headdim
    if CB is not None:
        CB += (b * nblocks * FORM.ngroups + g) * BLOCK_M * BLOCK_M
    if seq_idx is not None:
        seq_idx += b * seqlen
    if prev_states is not None:
        prev_states += (b * nchunks * FORM.nheads + h) * FORM.headdim * FORM.dstate
    in_p = offs_p < FORM.headdim
    if D is not None:
        skip = load_skip(D, strides.D, h, offs_p, FORM.headdim)
    offs_m = tl.arange(0, BLOCK_M)
    for token in tl.range(first, end, BLOCK_M):
        if prev_states is not None:
            store_prev_state(prev_states, state, token, offs_n, offs_p, FORM)
        C_i = load_block(C, strides.C, token, offs_m, offs_n, seqlen, FORM.dstate).to(DTYPE)
        B_j = load_block(B, strides.B, token, offs_m, offs_n, seqlen, FORM.dstate).to(DTYPE)
        x_j = load_block(x, strides.x, token, offs_m, offs_p, seqlen, FORM.headdim)
        A_i, from_start, to_end, carried = block_decays(dA_cumsum, seq_idx, token, offs_m, seqlen, BLOCK_M, FORM)
        dt_j = tl.load(dt + token + offs_m)

        acc = tl.dot(C_i, state.to(DTYPE), input_precision=FORM.precision) * from_start[:, None]  # [M, N] @ [N, P]
        # before the pairs are weighted: the next block waits for the state alone, and fewer registers are alive at once
        state = add_to_state(state, x_j, B_j, to_end * dt_j, carried, FORM)
        pairs = visible(seq_idx, token, offs_m, seqlen, False)
        if CB is None:
            CB_ij = tl.dot(C_i, tl.trans(B_j), input_precision=FORM.precision)  # [M, N] @ [N, M]
        else:
            block = tl.cast(token // BLOCK_M, tl.int64) * (FORM.ngroups * BLOCK_M * BLOCK_M)
            CB_ij = tl.load(CB + block + offs_m[:, None] * BLOCK_M + offs_m[None, :]).to(tl.float32)
        # selected, not multiplied by 0: above the diagonal CB may never have been written
        weights = tl.where(pairs, CB_ij * decay(A_i[:, None] - A_i[None, :], FORM.exp2), 0.0) * dt_j[None, :]
        acc = tl.dot(weights.to(DTYPE), x_j, acc, input_precision=FORM.precision)  # [M, M] @ [M, P]
        if D is not None:
            acc += skip * x_j.to(tl.float32)

        inside = (offs_m < seqlen - token)[:, None] & in_p[None, :]
        row = tl.cast(token, tl.int64) * (FORM.nheads * FORM.headdim)
        at = offs_m[:, None] * (FORM.nheads * FORM.headdim) + offs_p[None, :]
        if y is not None:
            tl.store(y + row + at, acc.to(DTYPE), mask=inside)
        if z is not None:
            z_i = load_block(z, strides.z, token, offs_m, offs_p, seqlen, FORM.headdim).to(tl.float32)
            acc *= gate(z_i)
        tl.store(out + row + at, acc.to(DTYPE), mask=inside)
    return state
