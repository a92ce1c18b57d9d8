"""walk_dstates, equations (29) and (22): the gradients of a sequence's states, from its last sub-chunk to its first.

    G <- m(prev, last) exp(A_last) G + sum_i m(prev, i) exp(A_i) C_i^T dy_i

Reads dy (batch, seqlen, nheads, headdim), C (batch, seqlen, ngroups, dstate), any strides; dA_cumsum (batch, nheads, nblocks,
BLOCK_M) fp32; prev_states (batch, nblocks, nheads, headdim, dstate), the state before each sub-chunk; dfinal_states (batch,
nheads, headdim, dstate), any strides. Writes dstates, the gradient of the state after each sub-chunk, shaped as prev_states in
the dtype of x; dinitial_states (batch, nheads, headdim, dstate) fp32, any strides; and s as partial sums over tiles of the
state, (batch, nheads, nblocks, ntiles) fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssd.kernels.arguments import cdiv, output, strides
from ssd.kernels.device import unpack_program
from ssd.runtime.launch import launch
from ssd.runtime.tuning import ConfigSpace
from ssd.types import Options, SSDInputs

from .walk import add_to_state, decays, load_initial, load_tokens, state_tile

CONFIGS = ConfigSpace(
    "walk_dstates",
    axes={"BLOCK_M": "chunk_size", "BLOCK_P": "headdim", "BLOCK_N": "dstate"},
    entries=((64, 32, 128, 4, 3), (64, 64, 128, 4, 3), (64, 64, 64, 4, 3), (64, 32, 128, 4, 2)),
    staged=(("BLOCK_M", "BLOCK_P"), ("BLOCK_M", "BLOCK_N"), ("BLOCK_P", "BLOCK_N")),
    unstaged=(("BLOCK_M", "BLOCK_P"),),
)


@triton.jit
def walk_dstates_kernel(dy, dy_strides, C, C_strides, dA_cumsum, seq_idx, prev_states, dfinal_states, dfinal_strides, dstates,
                        dinitial_states, dinitial_strides, s_tiles, seqlen, nblocks, NHEADS: tl.constexpr,
                        NGROUPS: tl.constexpr, HEADDIM: tl.constexpr, DSTATE: tl.constexpr, EXP2: tl.constexpr,
                        PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    DTYPE: tl.constexpr = dy.dtype.element_ty
    NTILES_N: tl.constexpr = (DSTATE + BLOCK_N - 1) // BLOCK_N
    NTILES: tl.constexpr = (HEADDIM + BLOCK_P - 1) // BLOCK_P * NTILES_N
    tile, h, _, b = unpack_program(NTILES, NHEADS, 1)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tile % NTILES_N * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_p = tile // NTILES_N * BLOCK_P + tl.arange(0, BLOCK_P)
    dy += b * dy_strides[0] + h * dy_strides[2]
    C += b * C_strides[0] + h // (NHEADS // NGROUPS) * C_strides[2]
    dA_cumsum += (b * NHEADS + h) * nblocks * BLOCK_M
    s_tiles += (b * NHEADS + h) * nblocks * NTILES + tile
    if seq_idx is not None:
        seq_idx += b * seqlen
    at, inside = state_tile(offs_n, offs_p, HEADDIM, DSTATE)
    state = (b * nblocks + nblocks - 1) * NHEADS + h
    prev_states += state * HEADDIM * DSTATE
    dstates += state * HEADDIM * DSTATE

    grad = load_initial(dfinal_states, dfinal_strides, b, h, offs_n, offs_p, HEADDIM, DSTATE)
    for step in tl.range(0, nblocks):
        block = nblocks - 1 - step
        token = block * BLOCK_M
        tl.store(dstates + at, grad.to(DTYPE), mask=inside)
        C_i = load_tokens(C, C_strides, token, offs_m, offs_n, seqlen, DSTATE)
        dy_i = load_tokens(dy, dy_strides, token, offs_m, offs_p, seqlen, HEADDIM)
        before = tl.load(prev_states + at, mask=inside, other=0.0).to(tl.float32)
        _A_i, from_start, _to_end, carried = decays(dA_cumsum, seq_idx, token, offs_m, seqlen, BLOCK_M, EXP2)
        tl.store(s_tiles + block * NTILES, carried * tl.sum(tl.sum(before * grad, 1), 0))
        grad = add_to_state(grad, dy_i, C_i, from_start, carried, PRECISION)
        prev_states -= NHEADS * HEADDIM * DSTATE
        dstates -= NHEADS * HEADDIM * DSTATE
    if dinitial_states is not None:
        dinitial_states += b * dinitial_strides[0] + h * dinitial_strides[1]
        at_any = offs_p.to(tl.int64)[None, :] * dinitial_strides[2] + offs_n.to(tl.int64)[:, None] * dinitial_strides[3]
        tl.store(dinitial_states + at_any, grad.to(dinitial_states.dtype.element_ty), mask=inside)


def walk_dstates(i: SSDInputs, dy: Tensor, dA_cumsum: Tensor, prev_states: Tensor, dfinal_states: Tensor | None,
                 options: Options, into: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns dstates, dinitial_states (None without initial_states) and the partial sums of s."""
    nblocks, span = dA_cumsum.shape[2:]
    config = CONFIGS.pick(i).launch | {"BLOCK_M": span}
    ntiles = cdiv(i.headdim, config["BLOCK_P"]) * cdiv(i.dstate, config["BLOCK_N"])
    dstates = torch.empty_like(prev_states, dtype=i.x.dtype)
    dinitial_states = None if i.initial_states is None else output(i.initial_states, into, torch.float32)
    s_tiles = torch.empty(i.batch, i.nheads, nblocks, ntiles, device=i.x.device, dtype=torch.float32)
    launch(
        walk_dstates_kernel, ntiles * i.nheads * i.batch,
        dy, dy.stride(), i.C, i.C.stride(), dA_cumsum, i.seq_idx, prev_states, dfinal_states, strides(dfinal_states), dstates,
        dinitial_states, strides(dinitial_states), s_tiles, i.seqlen, nblocks, i.nheads, i.ngroups, i.headdim, i.dstate,
        options.exp2, options.precision, **config)
    return dstates, dinitial_states, s_tiles
