"""chunk_state, equation (7): what a chunk alone adds to the state; and (11), the state at the end of a packed document.

    S = sum_j m(j, last) exp(A_last - A_j) dt_j x_j^T B_j

Reads x (batch, seqlen, nheads, headdim), B (batch, seqlen, ngroups, dstate), any strides; dt, dA_cumsum (batch,
nheads, nchunks, chunk_size) fp32. Writes states, S, (batch, nchunks, nheads, headdim, dstate) fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import COUNTS, Strides, cdiv, get_sizes
from ...kernels.device import (
    chunk_offset,
    decay,
    decays_from_start,
    decays_to_end,
    document_before,
    load_state,
    load_tokens,
    load_tokens_t,
    state_offset,
    step_offset,
    unpack_program,
)
from ...runtime.launch import launch
from ...runtime.tuning import Config, ConfigSpace
from ...types import Options, SSDInputs

CONFIGS = ConfigSpace(
    "chunk_state",
    axes={"BLOCK_P": "headdim", "BLOCK_N": "dstate", "BLOCK_K": "chunk_size"},
    entries=((64, 128, 64, 4, 3), (64, 128, 32, 4, 3), (64, 64, 64, 4, 3), (64, 128, 64, 8, 3), (64, 128, 32, 4, 4),
             (64, 128, 64, 4, 2), (64, 128, 128, 4, 2), (64, 64, 32, 4, 4)),
    staged=(("BLOCK_P", "BLOCK_K"), ("BLOCK_K", "BLOCK_N")),
)


@triton.jit
def unpack_state_tile(third, SIZES: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    """offs_p, offs_n, head, chunk or document, batch of this program; `third`: how many chunks or documents there are."""
    NTILES_N: tl.constexpr = (SIZES.dstate + BLOCK_N - 1) // BLOCK_N
    tile, h, c, b = unpack_program((SIZES.headdim + BLOCK_P - 1) // BLOCK_P * NTILES_N, SIZES.nheads, third)
    offs_p = tile // NTILES_N * BLOCK_P + tl.arange(0, BLOCK_P)
    return offs_p, tile % NTILES_N * BLOCK_N + tl.arange(0, BLOCK_N), h, c, b


@triton.jit
def store_state(states, offs_p, offs_n, values, SIZES: tl.constexpr):
    """`values` [P, N] to a contiguous state (headdim, dstate)."""
    tl.store(states + offs_p[:, None] * SIZES.dstate + offs_n[None, :], values,
             mask=(offs_p < SIZES.headdim)[:, None] & (offs_n < SIZES.dstate)[None, :])


@triton.jit
def add_tokens(acc, k, u, u_strides, v, v_strides, dt, dA_cumsum, seq_idx, document, rows, behind, offs_p, offs_n,
               TO_END: tl.constexpr, SIZES: tl.constexpr, PRECISION: tl.constexpr):
    """acc + sum_k w_k u_k^T v_k over those tokens k of a chunk, [BLOCK_K], that are before `rows`.

    u (of a head), v (of its group), dt, dA_cumsum and seq_idx point at the chunk's first token. w is `decays_to_end` with the
    last of the rows as the end, or `decays_from_start`; times the decay by `behind`, unless that is None.
    """
    u_t = load_tokens_t(u, u_strides, k, offs_p, rows, SIZES.headdim)  # [BLOCK_P, BLOCK_K]
    v_k = load_tokens(v, v_strides, k, offs_n, rows, SIZES.dstate)  # [BLOCK_K, BLOCK_N]
    if TO_END:
        w = decays_to_end(k, dt, dA_cumsum, seq_idx, rows - 1, document)
    else:
        w = decays_from_start(k, dA_cumsum, seq_idx, rows, document)
    if behind is not None:
        w *= decay(behind)
    return tl.dot((u_t.to(tl.float32) * w[None, :]).to(u_t.dtype), v_k.to(u_t.dtype), acc, input_precision=PRECISION)


@triton.jit
def weighted_outer(u, u_strides, v, v_strides, dt, dA_cumsum, seq_idx, document, rows, offs_p, offs_n, TO_END: tl.constexpr,
                   SIZES: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr):
    """What `add_tokens` adds for all tokens of a chunk, [BLOCK_P, BLOCK_N] fp32."""
    acc = tl.zeros([offs_p.shape[0], offs_n.shape[0]], tl.float32)
    for start in range(0, rows, BLOCK_K):
        acc = add_tokens(acc, start + tl.arange(0, BLOCK_K), u, u_strides, v, v_strides, dt, dA_cumsum, seq_idx, document, rows,
                         None, offs_p, offs_n, TO_END, SIZES, PRECISION)
    return acc


@triton.jit(do_not_specialize=COUNTS)
def chunk_state_kernel(x, B, dt, dA_cumsum, seq_idx, states, strides, seqlen, nchunks, SIZES: tl.constexpr,
                       PRECISION: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    offs_p, offs_n, h, c, b = unpack_state_tile(nchunks, SIZES, BLOCK_P, BLOCK_N)
    token = c * SIZES.chunk
    rows = tl.minimum(SIZES.chunk, seqlen - token).to(tl.int32)
    steps = step_offset(b, h, c, nchunks, SIZES)
    document = 0
    if seq_idx is not None:
        seq_idx += b * seqlen + token
        document = tl.load(seq_idx + rows - 1)
    acc = weighted_outer(x + chunk_offset(strides.x, b, token, h), strides.x,
                         B + chunk_offset(strides.B, b, token, h // (SIZES.nheads // SIZES.ngroups)), strides.B,
                         dt + steps, dA_cumsum + steps, seq_idx, document, rows, offs_p, offs_n, True, SIZES, BLOCK_K,
                         PRECISION)
    store_state(states + state_offset(b, c, h, nchunks, SIZES), offs_p, offs_n, acc, SIZES)


@triton.jit(do_not_specialize=COUNTS)
def varlen_states_kernel(x, B, dt, dA_cumsum, seq_idx, cu_seqlens, prev_states, states, strides, seqlen, nchunks,
                         SIZES: tl.constexpr, PRECISION: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
                         BLOCK_K: tl.constexpr):
    offs_p, offs_n, h, doc, _ = unpack_state_tile(tl.num_programs(0), SIZES, BLOCK_P, BLOCK_N)
    states += state_offset(0, doc, h, 0, SIZES)
    # values from the user that nobody has checked: kept inside the row
    start, end = tl.maximum(tl.load(cu_seqlens + doc), 0), tl.minimum(tl.load(cu_seqlens + doc + 1), seqlen)
    if start >= end:
        store_state(states, offs_p, offs_n, tl.zeros([BLOCK_P, BLOCK_N], tl.float32), SIZES)
        return
    c = ((end - 1) // SIZES.chunk).to(tl.int64)
    token = c * SIZES.chunk
    steps = step_offset(0, h, c, nchunks, SIZES)
    rows = (end - token).to(tl.int32)
    document = tl.load(seq_idx + end - 1)
    acc = weighted_outer(x + token * strides.x[1] + h * strides.x[2], strides.x,
                         B + token * strides.B[1] + h // (SIZES.nheads // SIZES.ngroups) * strides.B[2], strides.B,
                         dt + steps, dA_cumsum + steps, seq_idx + token, document, rows, offs_p, offs_n, True, SIZES, BLOCK_K,
                         PRECISION)
    if document == document_before(seq_idx, token):
        before = load_state(prev_states + state_offset(0, c, h, nchunks, SIZES), offs_p, offs_n, SIZES)
        acc += before.to(tl.float32) * decay(tl.load(dA_cumsum + steps + rows - 1))
    store_state(states, offs_p, offs_n, acc, SIZES)


def count_state_tiles(i: SSDInputs, config: Config) -> int:
    """Tiles of one state."""
    return cdiv(i.headdim, config["BLOCK_P"]) * cdiv(i.dstate, config["BLOCK_N"])


def chunk_state(i: SSDInputs, dt: Tensor, dA_cumsum: Tensor, options: Options) -> Tensor:
    """Returns states, fp32."""
    states = torch.empty(i.batch, i.nchunks, i.nheads, i.headdim, i.dstate, device=i.x.device, dtype=torch.float32)
    config = CONFIGS.pick(i)
    launch(
        chunk_state_kernel, count_state_tiles(i, config) * i.nheads * i.nchunks * i.batch,
        i.x, i.B, dt, dA_cumsum, i.seq_idx, states, Strides(x=i.x.stride(), B=i.B.stride()), i.seqlen, i.nchunks, get_sizes(i),
        options.precision, **config.launch)
    return states


def varlen_states(i: SSDInputs, dt: Tensor, dA_cumsum: Tensor, prev_states: Tensor, options: Options) -> Tensor:
    """Returns the state at the end of each document of i.cu_seqlens, (ndocs, nheads, headdim, dstate) fp32."""
    ndocs = i.cu_seqlens.shape[0] - 1
    states = torch.empty(ndocs, i.nheads, i.headdim, i.dstate, device=i.x.device, dtype=torch.float32)
    config = CONFIGS.pick(i)
    launch(
        varlen_states_kernel, count_state_tiles(i, config) * i.nheads * ndocs,
        i.x, i.B, dt, dA_cumsum, i.seq_idx, i.cu_seqlens, prev_states, states, Strides(x=i.x.stride(), B=i.B.stride()),
        i.seqlen, i.nchunks, get_sizes(i), options.precision, **config.launch)
    return states
