"""dstates_passing, equations (29) and (22): the gradients of the states, chunk_scan_dstates and state_passing_bwd in one.

    G <- m(prev, last) exp(A_last) G + sum_i m(prev, i) exp(A_i) C_i^T dy_i,  s = m(prev, last) exp(A_last) <H, G>

A program takes a tile of one head's state from the last block of the sequence to the first, with G in registers.

Reads dy (batch, seqlen, nheads, headdim), C (batch, seqlen, ngroups, dstate), any strides; dA_cumsum, A, (batch, nheads,
nblocks, BLOCK_M) fp32; prev_states, H, (batch, nblocks, nheads, headdim, dstate), the state before each block;
dfinal_states (batch, nheads, headdim, dstate), any strides. Writes dstates, G, the gradient of the state after each block,
shaped as prev_states in the dtype of x; dinitial_states (batch, nheads, headdim, dstate) fp32, any strides; and s as partial
sums over tiles of the state, (batch, nheads, nblocks, ntiles) fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssd.kernels.arguments import COUNTS, Strides, cdiv, output, strides
from ssd.kernels.device import state_tile_t, unpack_program
from ssd.runtime.launch import launch
from ssd.runtime.tuning import ConfigSpace
from ssd.types import Options, SSDInputs

from .segment import add_to_state, block_decays, get_form, load_block, load_initial

CONFIGS = ConfigSpace(
    "dstates_passing",
    axes={"BLOCK_M": "chunk_size", "BLOCK_P": "headdim", "BLOCK_N": "dstate"},
    entries=((64, 32, 128, 4, 3), (64, 64, 128, 4, 3), (64, 64, 64, 4, 3), (64, 32, 128, 4, 2)),
    staged=(("BLOCK_M", "BLOCK_P"), ("BLOCK_M", "BLOCK_N"), ("BLOCK_P", "BLOCK_N")),
    unstaged=(("BLOCK_M", "BLOCK_P"),),
)


@triton.jit(do_not_specialize=COUNTS)
def dstates_passing_kernel(dy, C, dA_cumsum, seq_idx, prev_states, dfinal_states, dstates, dinitial_states, s_tiles, strides,
                           dfinal_strides, dinitial_strides, seqlen, nblocks, FORM: tl.constexpr, BLOCK_M: tl.constexpr,
                           BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    DTYPE: tl.constexpr = dy.dtype.element_ty
    NTILES_N: tl.constexpr = (FORM.dstate + BLOCK_N - 1) // BLOCK_N
    NTILES: tl.constexpr = (FORM.headdim + BLOCK_P - 1) // BLOCK_P * NTILES_N
    tile, h, _, b = unpack_program(NTILES, FORM.nheads, 1)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tile % NTILES_N * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_p = tile // NTILES_N * BLOCK_P + tl.arange(0, BLOCK_P)
    dy += b * strides.dy[0] + h * strides.dy[2]
    C += b * strides.C[0] + h // (FORM.nheads // FORM.ngroups) * strides.C[2]
    dA_cumsum += (b * FORM.nheads + h) * nblocks * BLOCK_M
    s_tiles += (b * FORM.nheads + h) * nblocks * NTILES + tile
    if seq_idx is not None:
        seq_idx += b * seqlen
    at, inside = state_tile_t(offs_p, offs_n, FORM)
    state = (b * nblocks + nblocks - 1) * FORM.nheads + h
    prev_states += state * FORM.headdim * FORM.dstate
    dstates += state * FORM.headdim * FORM.dstate

    grad = load_initial(dfinal_states, dfinal_strides, b, h, offs_n, offs_p, FORM)
    for step in tl.range(0, nblocks):
        block = nblocks - 1 - step
        token = block * BLOCK_M
        tl.store(dstates + at, grad.to(DTYPE), mask=inside)
        C_i = load_block(C, strides.C, token, offs_m, offs_n, seqlen, FORM.dstate)
        dy_i = load_block(dy, strides.dy, token, offs_m, offs_p, seqlen, FORM.headdim)
        H_t = tl.load(prev_states + at, mask=inside, other=0.0).to(tl.float32)
        _A_i, from_start, _to_end, carried = block_decays(dA_cumsum, seq_idx, token, offs_m, seqlen, BLOCK_M, FORM)
        tl.store(s_tiles + block * NTILES, carried * tl.sum(tl.sum(H_t * grad, 1), 0))
        grad = add_to_state(grad, dy_i, C_i, from_start, carried, FORM)
        prev_states -= FORM.nheads * FORM.headdim * FORM.dstate
        dstates -= FORM.nheads * FORM.headdim * FORM.dstate
    if dinitial_states is not None:
        dinitial_states += b * dinitial_strides[0] + h * dinitial_strides[1]
        at_any = offs_p.to(tl.int64)[None, :] * dinitial_strides[2] + offs_n.to(tl.int64)[:, None] * dinitial_strides[3]
        tl.store(dinitial_states + at_any, grad.to(dinitial_states.dtype.element_ty), mask=inside)


def dstates_passing(i: SSDInputs, dy: Tensor, dA_cumsum: Tensor, prev_states: Tensor, dfinal_states: Tensor | None,
                    options: Options, into: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns dstates, dinitial_states (None without initial_states) and the partial sums of s."""
    nblocks, block = dA_cumsum.shape[2:]
    config = CONFIGS.pick(i).launch | {"BLOCK_M": block}
    ntiles = cdiv(i.headdim, config["BLOCK_P"]) * cdiv(i.dstate, config["BLOCK_N"])
    dstates = torch.empty_like(prev_states, dtype=i.x.dtype)
    dinitial_states = None if i.initial_states is None else output(i.initial_states, into, torch.float32)
    s_tiles = torch.empty(i.batch, i.nheads, nblocks, ntiles, device=i.x.device, dtype=torch.float32)
    launch(
        dstates_passing_kernel, ntiles * i.nheads * i.batch,
        dy, i.C, dA_cumsum, i.seq_idx, prev_states, dfinal_states, dstates, dinitial_states, s_tiles,
        Strides(C=i.C.stride(), dy=dy.stride()), strides(dfinal_states), strides(dinitial_states), i.seqlen, nblocks,
        get_form(i, options), **config)
    return dstates, dinitial_states, s_tiles
