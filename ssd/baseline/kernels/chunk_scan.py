"""chunk_scan, equations (10) and (5): the output, from CB, the tokens of the chunk and the state before it.

    y_i = m(prev, i) exp(A_i) H C_i + sum_{j<=i} m(j, i) CB_ij exp(A_i - A_j) dt_j x_j + D x_i,  out_i = y_i * silu(z_i)

Reads CB (batch, nchunks, ngroups, chunk_size, chunk_size) fp32; x, z (batch, seqlen, nheads, headdim) and C (batch,
seqlen, ngroups, dstate), any strides; dt, dA_cumsum (batch, nheads, nchunks, chunk_size) fp32; prev_states, H, (batch,
nchunks, nheads, headdim, dstate); D (nheads,) or (nheads, headdim). Writes out (batch, seqlen, nheads, headdim) in
the dtype of x and, where a backward will need it, y, the output before the gate.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import COUNTS, Strides, allocate_outputs, cdiv, get_sizes, strides
from ...kernels.device import (
    CB_offset,
    chunk_offset,
    decays_from_start,
    document_before,
    gate,
    load_skip,
    load_state_t,
    load_tokens,
    pair_weights,
    state_offset,
    step_offset,
    unpack_program,
)
from ...runtime.launch import launch
from ...runtime.tuning import ConfigSpace
from ...types import Options, SSDInputs

CONFIGS = ConfigSpace(
    "chunk_scan",
    axes={"BLOCK_M": "chunk_size", "BLOCK_P": "headdim", "BLOCK_K": "chunk_size", "BLOCK_N": "dstate"},
    entries=((64, 64, 64, 64, 4, 3), (128, 64, 64, 64, 4, 3), (64, 64, 32, 128, 4, 3), (128, 64, 32, 64, 4, 3),
             (128, 64, 64, 64, 8, 3), (64, 64, 64, 128, 4, 2), (64, 64, 64, 64, 4, 2), (128, 64, 32, 64, 8, 3)),
    staged=(("BLOCK_M", "BLOCK_K"), ("BLOCK_M", "BLOCK_K"), ("BLOCK_K", "BLOCK_P"), ("BLOCK_N", "BLOCK_P")),
)


@triton.jit(do_not_specialize=COUNTS)
def chunk_scan_kernel(CB, x, z, C, D, dt, dA_cumsum, seq_idx, prev_states, out, y, strides, seqlen, nchunks,
                      SIZES: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr,
                      BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr):
    DTYPE: tl.constexpr = x.dtype.element_ty
    NTILES_P: tl.constexpr = (SIZES.headdim + BLOCK_P - 1) // BLOCK_P
    tile, h, c, b = unpack_program(SIZES.chunk // BLOCK_M * NTILES_P, SIZES.nheads, nchunks)
    first = tile // NTILES_P * BLOCK_M
    g = h // (SIZES.nheads // SIZES.ngroups)
    token = c * SIZES.chunk
    rows = tl.minimum(SIZES.chunk, seqlen - token).to(tl.int32)
    if first >= rows:
        return
    offs_i, offs_p = first + tl.arange(0, BLOCK_M), tile % NTILES_P * BLOCK_P + tl.arange(0, BLOCK_P)
    x += chunk_offset(strides.x, b, token, h)
    C += chunk_offset(strides.C, b, token, g)
    CB += CB_offset(b, c, g, nchunks, SIZES)
    dt += step_offset(b, h, c, nchunks, SIZES)
    dA_cumsum += step_offset(b, h, c, nchunks, SIZES)
    prev_states += state_offset(b, c, h, nchunks, SIZES)
    document = 0
    if seq_idx is not None:
        document = document_before(seq_idx + b * seqlen, token)
        seq_idx += b * seqlen + token

    acc = tl.zeros([BLOCK_M, BLOCK_P], tl.float32)
    for start in range(0, SIZES.dstate, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        C_i = load_tokens(C, strides.C, offs_i, n, rows, SIZES.dstate)  # [BLOCK_M, BLOCK_N]
        H_t = load_state_t(prev_states, offs_p, n, SIZES)  # [BLOCK_N, BLOCK_P]
        acc = tl.dot(C_i.to(DTYPE), H_t.to(DTYPE), acc, input_precision=PRECISION)
    acc *= decays_from_start(offs_i, dA_cumsum, seq_idx, rows, document)[:, None]

    A_i = tl.load(dA_cumsum + offs_i)
    for start in range(0, tl.minimum(first + BLOCK_M, rows), BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        CB_ij = tl.load(CB + offs_i[:, None] * SIZES.chunk + j[None, :])
        weights = pair_weights(CB_ij, A_i, dt, dA_cumsum, offs_i, j, seq_idx, rows)
        x_j = load_tokens(x, strides.x, j, offs_p, rows, SIZES.headdim)
        acc = tl.dot(weights.to(DTYPE), x_j, acc, input_precision=PRECISION)  # [BLOCK_M, BLOCK_K] @ [BLOCK_K, BLOCK_P]

    if D is not None:
        skip = load_skip(D, strides.D, h, offs_p, SIZES.headdim)
        acc += skip * load_tokens(x, strides.x, offs_i, offs_p, rows, SIZES.headdim).to(tl.float32)
    inside = (offs_i < rows)[:, None] & (offs_p < SIZES.headdim)[None, :]
    at = ((b * seqlen + token + offs_i[:, None]) * SIZES.nheads + h) * SIZES.headdim + offs_p[None, :]
    if y is not None:
        tl.store(y + at, acc.to(DTYPE), mask=inside)
    if z is not None:
        z += chunk_offset(strides.z, b, token, h)
        z_i = load_tokens(z, strides.z, offs_i, offs_p, rows, SIZES.headdim).to(tl.float32)
        acc *= gate(z_i)
    tl.store(out + at, acc.to(DTYPE), mask=inside)


def chunk_scan(i: SSDInputs, CB: Tensor, dt: Tensor, dA_cumsum: Tensor, prev_states: Tensor, options: Options,
               save: bool) -> tuple[Tensor, Tensor | None]:
    """Returns out and, with z and where a backward may follow (`save`), y."""
    out, y = allocate_outputs(i, save)
    config = CONFIGS.pick(i)
    tiles = i.chunk_size // config["BLOCK_M"] * cdiv(i.headdim, config["BLOCK_P"])
    launch(
        chunk_scan_kernel, tiles * i.nheads * i.nchunks * i.batch,
        CB, i.x, i.z, i.C, i.D, dt, dA_cumsum, i.seq_idx, prev_states, out, y,
        Strides(x=i.x.stride(), z=strides(i.z), C=i.C.stride(), D=strides(i.D)), i.seqlen, i.nchunks, get_sizes(i),
        options.precision, **config.launch)
    return out, y
