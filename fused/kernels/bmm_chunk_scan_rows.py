"""bmm_chunk_scan_rows, equations (9), (10) and (5): bmm_chunk and chunk_scan in one, without blocks that carry a state.

A program takes BLOCK_M rows of a chunk and meets every BLOCK_K columns before them. It runs where `Options.two_level` is off.

Reads x, z (batch, seqlen, nheads, headdim), B, C (batch, seqlen, ngroups, dstate), any strides; CB (batch, nchunks, ngroups,
chunk_size, chunk_size), or None to compute it in the tile; D (nheads,) or (nheads, headdim); dt, dA_cumsum (batch, nheads,
nchunks, chunk_size) fp32; prev_states, H, (batch, nchunks, nheads, headdim, dstate). Writes out (batch, seqlen, nheads,
headdim) in the dtype of x and, where it is kept, y, the output before the gate.
"""

import triton
import triton.language as tl
from torch import Tensor

from ssd.kernels.arguments import COUNTS, Strides, allocate_outputs, cdiv, strides
from ssd.kernels.device import (
    CB_offset,
    decay,
    document_before,
    gate,
    keep_document,
    load_skip,
    load_state_t,
    pair_weights,
    scale_exponent,
    state_offset,
    step_offset,
    unpack_program,
)
from ssd.runtime.launch import launch
from ssd.runtime.tuning import ConfigSpace
from ssd.types import Options, SSDInputs

from .segment import get_form, load_block

CONFIGS = ConfigSpace(
    "bmm_chunk_scan_rows",
    axes={"BLOCK_M": "chunk_size", "BLOCK_P": "headdim", "BLOCK_K": "chunk_size", "BLOCK_N": "dstate"},
    entries=((64, 64, 64, 256, 4, 2), (64, 64, 64, 256, 4, 3), (128, 64, 64, 256, 8, 2), (64, 64, 32, 256, 4, 3)),
    staged=(("BLOCK_K", "BLOCK_N"), ("BLOCK_K", "BLOCK_P")),
    unstaged=(("BLOCK_M", "BLOCK_N"), ("BLOCK_N", "BLOCK_P")),
    whole_dstate=True,
)


@triton.jit(do_not_specialize=COUNTS)
def bmm_chunk_scan_rows_kernel(x, z, B, C, CB, D, dt, dA_cumsum, seq_idx, prev_states, out, y, strides, seqlen, nchunks,
                               FORM: tl.constexpr, CAUSAL_BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr,
                               BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr):
    DTYPE: tl.constexpr = x.dtype.element_ty
    NTILES_P: tl.constexpr = (FORM.headdim + BLOCK_P - 1) // BLOCK_P
    tile, h, c, b = unpack_program(FORM.chunk // BLOCK_M * NTILES_P, FORM.nheads, nchunks)
    g = h // (FORM.nheads // FORM.ngroups)
    token = c.to(tl.int32) * FORM.chunk
    rows, first = tl.minimum(FORM.chunk, seqlen - token), tile // NTILES_P * BLOCK_M
    if first >= rows:
        return
    offs_m, offs_k, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_N)
    offs_i, offs_p = first + offs_m, tile % NTILES_P * BLOCK_P + tl.arange(0, BLOCK_P)
    x += b * strides.x[0] + h * strides.x[2]
    B += b * strides.B[0] + g * strides.B[2]
    C += b * strides.C[0] + g * strides.C[2]
    dt += step_offset(b, h, c, nchunks, FORM)
    dA_cumsum += step_offset(b, h, c, nchunks, FORM)
    if CB is not None:
        CB += CB_offset(b, c, g, nchunks, FORM)
    document = 0
    if seq_idx is not None:
        seq_idx += b * seqlen
        document = document_before(seq_idx, token)
        seq_idx += token

    C_i = load_block(C, strides.C, token + first, offs_m, offs_n, seqlen, FORM.dstate).to(DTYPE)
    H_t = load_state_t(prev_states + state_offset(b, c, h, nchunks, FORM), offs_p, offs_n, FORM).to(DTYPE)
    A_i = scale_exponent(tl.load(dA_cumsum + offs_i), FORM.exp2)
    from_start = keep_document(decay(A_i, FORM.exp2), seq_idx, offs_i, offs_i < rows, document)
    acc = tl.dot(C_i, H_t, input_precision=FORM.precision) * from_start[:, None]  # [M, N] @ [N, P]

    for start in range(0, tl.minimum(first + BLOCK_M, rows) if CAUSAL_BLOCKS else rows, BLOCK_K):
        j = start + offs_k
        x_j = load_block(x, strides.x, token + start, offs_k, offs_p, seqlen, FORM.headdim)
        if CB is None:
            B_j = load_block(B, strides.B, token + start, offs_k, offs_n, seqlen, FORM.dstate).to(DTYPE)
            CB_ij = tl.dot(C_i, tl.trans(B_j), input_precision=FORM.precision)  # [M, N] @ [N, K]
        else:
            CB_ij = tl.load(CB + offs_i[:, None] * FORM.chunk + j[None, :]).to(tl.float32)
        weights = pair_weights(CB_ij, A_i, dt, dA_cumsum, offs_i, j, seq_idx, rows, FORM.exp2)
        acc = tl.dot(weights.to(DTYPE), x_j, acc, input_precision=FORM.precision)  # [M, K] @ [K, P]

    inside = (offs_i < rows)[:, None] & (offs_p < FORM.headdim)[None, :]
    if D is not None:
        skip = load_skip(D, strides.D, h, offs_p, FORM.headdim)
        acc += skip * load_block(x, strides.x, token + first, offs_m, offs_p, seqlen, FORM.headdim).to(tl.float32)
    at = ((b * seqlen + token + offs_i[:, None]) * FORM.nheads + h) * FORM.headdim + offs_p[None, :]
    if y is not None:
        tl.store(y + at, acc.to(DTYPE), mask=inside)
    if z is not None:
        z += b * strides.z[0] + h * strides.z[2]
        z_i = load_block(z, strides.z, token + first, offs_m, offs_p, seqlen, FORM.headdim).to(tl.float32)
        acc *= gate(z_i)
    tl.store(out + at, acc.to(DTYPE), mask=inside)


def bmm_chunk_scan_rows(i: SSDInputs, CB: Tensor | None, dt: Tensor, dA_cumsum: Tensor, prev_states: Tensor, options: Options,
                        save: bool) -> tuple[Tensor, Tensor | None]:
    """Returns out and, with z and where a backward may follow (`save`), y."""
    out, y = allocate_outputs(i, save)
    config = CONFIGS.pick(i)
    tiles = i.chunk_size // config["BLOCK_M"] * cdiv(i.headdim, config["BLOCK_P"])
    launch(
        bmm_chunk_scan_rows_kernel, tiles * i.nheads * i.nchunks * i.batch,
        i.x, i.z, i.B, i.C, CB, i.D, dt, dA_cumsum, i.seq_idx, prev_states, out, y,
        Strides(x=i.x.stride(), z=strides(i.z), B=i.B.stride(), C=i.C.stride(), D=strides(i.D)), i.seqlen, i.nchunks,
        get_form(i, options), options.causal_blocks, **config.launch)
    return out, y
