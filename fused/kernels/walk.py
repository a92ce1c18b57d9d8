"""The walk, equations (26) and (27): a block takes a head's tokens in sub-chunks, the state in its registers.

    y_i = m(prev, i) exp(A_i) C_i H + sum_{j<=i} m(j, i) CB_ij exp(A_i - A_j) dt_j x_j + D x_i
    H  <- m(prev, last) exp(A_last) H + sum_j m(j, last) exp(A_last - A_j) dt_j B_j^T x_j

A sub-chunk is BLOCK_M tokens. H is [BLOCK_N, BLOCK_P] fp32: the whole dstate, padded, and a block of headdim. dt and
dA_cumsum are fp32, contiguous (batch, nheads, seqlen rounded up); dA_cumsum restarts every CUMSUM tokens, a multiple of
BLOCK_M. Exponents are scaled to powers of two as vectors, before their differences are taken.

The functions here know no schedule: kernels say which tokens a block walks, and from which state.
"""

import triton
import triton.language as tl

from ssd.kernels.device import LOG2E, sigmoid


@triton.jit
def load_tokens(t, strides, token, offs_m, offs_c, seqlen, WIDTH: tl.constexpr):
    """Rows token + offs_m and channels offs_c of a tensor (batch, seqlen, heads, channels): [M, C], 0 outside.

    t points at the batch and head.
    """
    inside = (offs_m < seqlen - token)[:, None] & (offs_c < WIDTH)[None, :]
    at = offs_m[:, None] * strides[1] + offs_c[None, :] * strides[3]
    return tl.load(t + tl.cast(token, tl.int64) * strides[1] + at, mask=inside, other=0.0)


@triton.jit
def exponent(dA, EXP2: tl.constexpr):
    """A cumulative sum in the units that `decay` takes."""
    return dA * LOG2E if EXP2 else dA


@triton.jit
def decay(v, EXP2: tl.constexpr):
    """exp of a difference of two `exponent`s that is <= 0 but for rounding: clamped. NaN stays NaN."""
    v = tl.minimum(v, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.math.exp2(v) if EXP2 else tl.exp(v)


@triton.jit
def documents_around(seq_idx, token, offs_m, seqlen):
    """Documents of a sub-chunk's tokens [M], of the token before them (0 before the first), and of the last of them."""
    last = tl.minimum(token + offs_m.shape[0], seqlen) - 1
    own = tl.load(seq_idx + token + offs_m, mask=token + offs_m <= last, other=-1)
    return own, tl.load(seq_idx + token - 1, mask=token > 0, other=0), tl.load(seq_idx + last)


@triton.jit
def decays(dA_cumsum, seq_idx, token, offs_m, seqlen, CUMSUM: tl.constexpr, EXP2: tl.constexpr):
    """Of a sub-chunk: A_i in units of `decay` and, with documents, m(prev, i) exp(A_i), m(i, last) exp(A_last - A_i), all
    [M], and m(prev, last) exp(A_last)."""
    BLOCK_M: tl.constexpr = offs_m.shape[0]
    A_i = exponent(tl.load(dA_cumsum + token + offs_m), EXP2)
    A_last = exponent(tl.load(dA_cumsum + token + BLOCK_M - 1), EXP2)
    if BLOCK_M < CUMSUM:
        before = exponent(tl.load(dA_cumsum + token - 1, mask=token % CUMSUM != 0, other=0.0), EXP2)
        A_i, A_last = A_i - before, A_last - before
    from_start, to_end, carried = decay(A_i, EXP2), decay(A_last - A_i, EXP2), decay(A_last, EXP2)
    if seq_idx is not None:
        own, before, last = documents_around(seq_idx, token, offs_m, seqlen)
        from_start = tl.where(own == before, from_start, 0.0)
        to_end = tl.where(own == last, to_end, 0.0)
        carried = tl.where(before == last, carried, 0.0)
    return A_i, from_start, to_end, carried


@triton.jit
def visible(seq_idx, token, offs_m, seqlen, TRANSPOSED: tl.constexpr):
    """j <= i and m(j, i): a tile [i, j] of booleans over a sub-chunk, or [j, i]. seq_idx points at the row, or is None."""
    pairs = offs_m[:, None] <= offs_m[None, :] if TRANSPOSED else offs_m[:, None] >= offs_m[None, :]
    if seq_idx is not None:
        own, _, _ = documents_around(seq_idx, token, offs_m, seqlen)
        pairs &= own[:, None] == own[None, :]
    return pairs


@triton.jit
def add_to_state(state, x_j, B_j, weights, carried, PRECISION: tl.constexpr):
    """(27): carried H + sum_j weights_j B_j^T x_j."""
    weighted = (x_j.to(tl.float32) * weights[:, None]).to(x_j.dtype)
    return tl.dot(tl.trans(B_j).to(x_j.dtype), weighted, state * carried, input_precision=PRECISION)


@triton.jit
def state_tile(offs_n, offs_p, HEADDIM: tl.constexpr, DSTATE: tl.constexpr):
    """Offsets of [N, P] in a contiguous state (headdim, dstate), and which are inside."""
    return offs_p[None, :] * DSTATE + offs_n[:, None], (offs_n < DSTATE)[:, None] & (offs_p < HEADDIM)[None, :]


@triton.jit
def load_initial(initial_states, strides, b, h, offs_n, offs_p, HEADDIM: tl.constexpr, DSTATE: tl.constexpr):
    """initial_states (batch, nheads, headdim, dstate), any strides, as [N, P] fp32; zeros for None."""
    if initial_states is None:
        state = tl.zeros([offs_n.shape[0], offs_p.shape[0]], tl.float32)
    else:
        at = offs_p.to(tl.int64)[None, :] * strides[2] + offs_n.to(tl.int64)[:, None] * strides[3]
        inside = (offs_n < DSTATE)[:, None] & (offs_p < HEADDIM)[None, :]
        state = tl.load(initial_states + b * strides[0] + h * strides[1] + at, mask=inside, other=0.0).to(tl.float32)
    return state


@triton.jit
def load_skip(D, strides, h, offs_p, HEADDIM: tl.constexpr):
    """D (nheads,) as a number, which takes one register, or (nheads, headdim) as [1, P]; fp32."""
    if len(strides) == 1:
        skip = tl.load(D + h * strides[0]).to(tl.float32)
    else:
        at = h * strides[0] + offs_p.to(tl.int64) * strides[1]
        skip = tl.load(D + at, mask=offs_p < HEADDIM, other=0.0).to(tl.float32)[None, :]
    return skip


@triton.jit
def store_prev_state(prev_states, state, token, offs_n, offs_p, NHEADS: tl.constexpr, HEADDIM: tl.constexpr,
                     DSTATE: tl.constexpr, CHUNK: tl.constexpr):
    """The state before `token`, if a chunk begins there; prev_states points at the head in the row's first chunk."""
    if token % CHUNK == 0:
        at, inside = state_tile(offs_n, offs_p, HEADDIM, DSTATE)
        chunk = tl.cast(token // CHUNK, tl.int64) * NHEADS * HEADDIM * DSTATE
        tl.store(prev_states + chunk + at, state.to(prev_states.dtype.element_ty), mask=inside)


@triton.jit
def walk_state(state, first, end, b, h, offs_n, offs_p, x, x_strides, B, B_strides, dt, dA_cumsum, seq_idx, prev_states, seqlen,
               nchunks, NHEADS: tl.constexpr, NGROUPS: tl.constexpr, HEADDIM: tl.constexpr, DSTATE: tl.constexpr,
               CHUNK: tl.constexpr, CUMSUM: tl.constexpr, EXP2: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr):
    """(27) over tokens [first, end): the state after them, and the factor by which the one before them entered it.

    Any block [N, P] of the state. prev_states (batch, nchunks, nheads, headdim, dstate), or None, gets the state before
    each chunk that begins here.
    """
    g = h // (NHEADS // NGROUPS)
    x += b * x_strides[0] + h * x_strides[2]
    B += b * B_strides[0] + g * B_strides[2]
    padded = tl.cast(tl.cdiv(seqlen, CUMSUM), tl.int64) * CUMSUM
    dt += (b * NHEADS + h) * padded
    dA_cumsum += (b * NHEADS + h) * padded
    if seq_idx is not None:
        seq_idx += b * seqlen
    if prev_states is not None:
        prev_states += (b * nchunks * NHEADS + h) * HEADDIM * DSTATE
    offs_m = tl.arange(0, BLOCK_M)
    factor = 1.0
    for token in tl.range(first, end, BLOCK_M):
        if prev_states is not None:
            store_prev_state(prev_states, state, token, offs_n, offs_p, NHEADS, HEADDIM, DSTATE, CHUNK)
        x_j = load_tokens(x, x_strides, token, offs_m, offs_p, seqlen, HEADDIM)
        B_j = load_tokens(B, B_strides, token, offs_m, offs_n, seqlen, DSTATE)
        _, _, to_end, carried = decays(dA_cumsum, seq_idx, token, offs_m, seqlen, CUMSUM, EXP2)
        weights = to_end * tl.load(dt + token + offs_m)
        state = add_to_state(state, x_j, B_j, weights, carried, PRECISION)
        factor *= carried
    return state, factor


@triton.jit
def walk(state, first, end, b, h, offs_n, offs_p, x, x_strides, z, z_strides, B, B_strides, C, C_strides, CB, D, D_strides, dt,
         dA_cumsum, seq_idx, prev_states, out, y, seqlen, nchunks, NHEADS: tl.constexpr, NGROUPS: tl.constexpr,
         HEADDIM: tl.constexpr, DSTATE: tl.constexpr, CHUNK: tl.constexpr, EXP2: tl.constexpr, PRECISION: tl.constexpr,
         BLOCK_M: tl.constexpr):
    """(26), (27) and (5) over tokens [first, end): writes out, and y unless it is None; returns the state after them.

    dA_cumsum restarts every BLOCK_M tokens. CB (batch, sub-chunks, ngroups, BLOCK_M, BLOCK_M) is read from memory, or
    computed here where it is None. prev_states: see `walk_state`.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    g = h // (NHEADS // NGROUPS)
    nblocks = tl.cast(tl.cdiv(seqlen, BLOCK_M), tl.int64)
    x += b * x_strides[0] + h * x_strides[2]
    B += b * B_strides[0] + g * B_strides[2]
    C += b * C_strides[0] + g * C_strides[2]
    dt += (b * NHEADS + h) * nblocks * BLOCK_M
    dA_cumsum += (b * NHEADS + h) * nblocks * BLOCK_M
    out += (b * seqlen * NHEADS + h) * HEADDIM
    if z is not None:
        z += b * z_strides[0] + h * z_strides[2]
    if y is not None:
        y += (b * seqlen * NHEADS + h) * HEADDIM
    if CB is not None:
        CB += (b * nblocks * NGROUPS + g) * BLOCK_M * BLOCK_M
    if seq_idx is not None:
        seq_idx += b * seqlen
    if prev_states is not None:
        prev_states += (b * nchunks * NHEADS + h) * HEADDIM * DSTATE
    in_p = offs_p < HEADDIM
    if D is not None:
        skip = load_skip(D, D_strides, h, offs_p, HEADDIM)
    offs_m = tl.arange(0, BLOCK_M)
    for token in tl.range(first, end, BLOCK_M):
        if prev_states is not None:
            store_prev_state(prev_states, state, token, offs_n, offs_p, NHEADS, HEADDIM, DSTATE, CHUNK)
        C_i = load_tokens(C, C_strides, token, offs_m, offs_n, seqlen, DSTATE).to(DTYPE)
        B_j = load_tokens(B, B_strides, token, offs_m, offs_n, seqlen, DSTATE).to(DTYPE)
        x_j = load_tokens(x, x_strides, token, offs_m, offs_p, seqlen, HEADDIM)
        A_i, from_start, to_end, carried = decays(dA_cumsum, seq_idx, token, offs_m, seqlen, BLOCK_M, EXP2)
        dt_j = tl.load(dt + token + offs_m)

        acc = tl.dot(C_i, state.to(DTYPE), input_precision=PRECISION) * from_start[:, None]
        # before the pairs are weighted: the next sub-chunk waits for the state alone, and fewer registers are alive at once
        state = add_to_state(state, x_j, B_j, to_end * dt_j, carried, PRECISION)
        pairs = visible(seq_idx, token, offs_m, seqlen, False)
        if CB is None:
            CB_ij = tl.dot(C_i, tl.trans(B_j), input_precision=PRECISION)
        else:
            block = tl.cast(token // BLOCK_M, tl.int64) * (NGROUPS * BLOCK_M * BLOCK_M)
            CB_ij = tl.load(CB + block + offs_m[:, None] * BLOCK_M + offs_m[None, :]).to(tl.float32)
        # selected, not multiplied by 0: above the diagonal CB may never have been written
        weights = tl.where(pairs, CB_ij * decay(A_i[:, None] - A_i[None, :], EXP2), 0.0) * dt_j[None, :]
        acc = tl.dot(weights.to(DTYPE), x_j, acc, input_precision=PRECISION)
        if D is not None:
            acc += skip * x_j.to(tl.float32)

        inside = (offs_m < seqlen - token)[:, None] & in_p[None, :]
        row = tl.cast(token, tl.int64) * (NHEADS * HEADDIM)
        at = offs_m[:, None] * (NHEADS * HEADDIM) + offs_p[None, :]
        if y is not None:
            tl.store(y + row + at, acc.to(DTYPE), mask=inside)
        if z is not None:
            z_i = load_tokens(z, z_strides, token, offs_m, offs_p, seqlen, HEADDIM).to(tl.float32)
            acc *= z_i * sigmoid(z_i)
        tl.store(out + row + at, acc.to(DTYPE), mask=inside)
    return state
