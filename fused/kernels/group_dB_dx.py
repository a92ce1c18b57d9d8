"""group_dB_dx, equations (18), (19), (21), (32): dx and dB of a sub-chunk, and what its states and steps get from them.

Reads x, dy (batch, seqlen, nheads, headdim), B, C (batch, seqlen, ngroups, dstate), any strides; dt, dA_cumsum (batch, nheads,
nblocks, BLOCK_M) fp32; dstates (batch, nblocks, nheads, headdim, dstate), the gradient of the state after each sub-chunk; dCB
as group_dC leaves it; D (nheads,) or (nheads, headdim). Writes dx, any strides; (u + v) . x and q (batch, nheads, nblocks,
BLOCK_M) fp32; dB, any strides, in the dtype of B, or as parts of the splits, (splits, batch, seqlen, ngroups, dstate) fp32; and
dD as partial sums over sub-chunks, (batch * nblocks, nheads, headdim or 1) fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssd.kernels.arguments import output, strides
from ssd.kernels.device import product, split_heads, unpack_program
from ssd.kernels.sum_parts import sum_first
from ssd.runtime.launch import launch
from ssd.runtime.tuning import ConfigSpace
from ssd.types import Options, SSDInputs

from .group import load_states, parts_of, store_tokens, summed
from .walk import decay, decays, load_skip, load_tokens, visible

CONFIGS = ConfigSpace(
    "group_dB_dx",
    axes={"BLOCK_M": "chunk_size", "BLOCK_P": "headdim", "BLOCK_N": "dstate"},
    entries=((64, 64, 256, 8, 2), (64, 64, 256, 8, 3), (64, 32, 256, 8, 2)),
    staged=(("BLOCK_P", "BLOCK_N"), ("BLOCK_M", "BLOCK_P"), ("BLOCK_M", "BLOCK_P")),
    unstaged=(("BLOCK_M", "BLOCK_N"), ("BLOCK_M", "BLOCK_N"), ("BLOCK_M", "BLOCK_P"), ("BLOCK_M", "BLOCK_M")),
    whole_dstate=True, state_in_registers=True,
)


@triton.jit
def skip_grads(dD_tiles, dy_j, x_j, offs_p, HEADDIM: tl.constexpr, PER_CHANNEL: tl.constexpr):
    """(19): sum_j dy_j x_j of a block of headdim, stored where D has channels; returns its sum over them."""
    by_channel = tl.sum(product(dy_j, x_j), 0)
    if PER_CHANNEL:
        tl.store(dD_tiles + offs_p, by_channel, mask=offs_p < HEADDIM)
    return tl.sum(by_channel, 0)


@triton.jit
def head_grads(dB_j, B_j, pairs, to_end, dt_j, x, x_strides, dy, dy_strides, D, D_strides, dstates, dx, dx_strides, dD_tiles, h,
               token, offs_m, offs_n, seqlen, HEADDIM: tl.constexpr, DSTATE: tl.constexpr, PRECISION: tl.constexpr,
               BLOCK_P: tl.constexpr):
    """One head: writes dx and dD, adds to dB_j [M, N]; returns it, (u + v) . x and v . x [M]. Pointers are at the head.

    pairs: the weights of dy_i in u_j, [j, i] in the dtype of x.
    """
    u_v_x = tl.zeros([offs_m.shape[0]], tl.float32)
    v_x = tl.zeros([offs_m.shape[0]], tl.float32)
    dD = 0.0
    for first in range(0, HEADDIM, BLOCK_P):
        offs_p = first + tl.arange(0, BLOCK_P)
        dH = load_states(dstates, offs_p, offs_n, HEADDIM, DSTATE)
        dy_j = load_tokens(dy, dy_strides, token, offs_m, offs_p, seqlen, HEADDIM)
        x_j = load_tokens(x, x_strides, token, offs_m, offs_p, seqlen, HEADDIM).to(tl.float32)
        u_v = tl.dot(B_j, tl.trans(dH), input_precision=PRECISION) * to_end[:, None]
        v_x += tl.sum(u_v * x_j, 1)
        weights = pairs
        if HEADDIM > BLOCK_P and pairs.dtype.primitive_bitwidth == 16:
            # ptxas 12.8 gives away the registers of a product's left operand that a loop does not write: write them
            nothing = ((token + first) >> 31).to(tl.int16)
            weights = (pairs.to(tl.int16, bitcast=True) | nothing).to(pairs.dtype, bitcast=True)
        u_v = tl.dot(weights, dy_j, u_v, input_precision=PRECISION)
        u_v_x += tl.sum(u_v * x_j, 1)
        dx_j = u_v * dt_j[:, None]
        if D is not None:
            dy_f = dy_j.to(tl.float32)
            dx_j += load_skip(D, D_strides, h, offs_p, HEADDIM) * dy_f
            dD += skip_grads(dD_tiles, dy_f, x_j, offs_p, HEADDIM, len(D_strides) == 2)
        store_tokens(dx, dx_strides, token, offs_m, offs_p, seqlen, dx_j, HEADDIM)
        weighted = (x_j * (dt_j * to_end)[:, None]).to(dH.dtype)
        dB_j = tl.dot(weighted, dH, dB_j, input_precision=PRECISION)
    if D is not None and len(D_strides) == 1:
        tl.store(dD_tiles, dD)
    return dB_j, u_v_x, v_x


@triton.jit(do_not_specialize=["nblocks"])  # where it is 1, `nothing` above would be known
def group_dB_dx_kernel(x, x_strides, dy, dy_strides, B, B_strides, C, C_strides, D, D_strides, dt, dA_cumsum, seq_idx, dstates,
                       dCB, dx, dx_strides, dB, dB_strides, part_stride, u_v_x, q, dD_tiles, seqlen, nblocks,
                       NHEADS: tl.constexpr, NGROUPS: tl.constexpr, HEADDIM: tl.constexpr, DSTATE: tl.constexpr,
                       SPLITS: tl.constexpr, EXP2: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
                       BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    DTYPE: tl.constexpr = x.dtype.element_ty
    HEADS: tl.constexpr = NHEADS // NGROUPS
    D_WIDTH: tl.constexpr = HEADDIM if D is not None and len(D_strides) == 2 else 1
    _, slot, c, b = unpack_program(1, NGROUPS * SPLITS, nblocks)
    g, split, head, count = split_heads(slot, HEADS, SPLITS)
    token = c.to(tl.int32) * BLOCK_M
    offs_m, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    x += b * x_strides[0]
    dy += b * dy_strides[0]
    dx += b * dx_strides[0]
    B += b * B_strides[0] + g * B_strides[2]
    C += b * C_strides[0] + g * C_strides[2]
    dB += split * part_stride + b * dB_strides[0] + g * dB_strides[2]
    dCB += ((b * nblocks + c) * NGROUPS * SPLITS + slot) * BLOCK_M * BLOCK_M
    dstates += (b * nblocks + c) * NHEADS * HEADDIM * DSTATE
    if D is not None:
        dD_tiles += (b * nblocks + c) * NHEADS * D_WIDTH
    if seq_idx is not None:
        seq_idx += b * seqlen

    B_j = load_tokens(B, B_strides, token, offs_m, offs_n, seqlen, DSTATE).to(DTYPE)
    C_i = load_tokens(C, C_strides, token, offs_m, offs_n, seqlen, DSTATE).to(DTYPE)
    BC = tl.where(visible(seq_idx, token, offs_m, seqlen, True), tl.dot(B_j, tl.trans(C_i), input_precision=PRECISION), 0.0)
    dCB_ij = tl.load(dCB + offs_m[:, None] * BLOCK_M + offs_m[None, :])
    dB_j = tl.dot(tl.trans(dCB_ij), C_i, input_precision=PRECISION)
    for k in tl.range(0, count):
        h = g * HEADS + head + k
        per_head = (b * NHEADS + h) * nblocks * BLOCK_M
        A_j, _from_start, to_end, _carried = decays(dA_cumsum + per_head, seq_idx, token, offs_m, seqlen, BLOCK_M, EXP2)
        at = per_head + token + offs_m
        dt_j = tl.load(dt + at)
        pairs = (BC * decay(A_j[None, :] - A_j[:, None], EXP2)).to(DTYPE)
        dB_j, u_v_x_j, v_x_j = head_grads(
            dB_j, B_j, pairs, to_end, dt_j, x + h * x_strides[2], x_strides, dy + h * dy_strides[2], dy_strides, D, D_strides,
            dstates + h * HEADDIM * DSTATE, dx + h * dx_strides[2], dx_strides, None if D is None else dD_tiles + h * D_WIDTH,
            h, token, offs_m, offs_n, seqlen, HEADDIM, DSTATE, PRECISION, BLOCK_P)
        tl.store(u_v_x + at, u_v_x_j)
        tl.store(q + at, dt_j * v_x_j)
    store_tokens(dB, dB_strides, token, offs_m, offs_n, seqlen, dB_j, DSTATE)


def group_dB_dx(i: SSDInputs, dt: Tensor, dA_cumsum: Tensor, dy: Tensor, dstates: Tensor, dCB: Tensor, options: Options,
                into_dx: Tensor | None, into_dB: Tensor | None):
    """Returns dx, dB, dD (None without D), summed, (u + v) . x and q."""
    nblocks, span = dA_cumsum.shape[2:]
    splits, dx = dCB.shape[3], output(i.x, into_dx)
    parts, dD_tiles = parts_of(i.B, into_dB, splits), None
    if i.D is not None:
        dD_tiles = torch.empty(i.batch * nblocks, *i.D.shape, device=dt.device, dtype=torch.float32)
    u_v_x, q = torch.empty_like(dt), torch.empty_like(dt)
    launch(
        group_dB_dx_kernel, i.ngroups * splits * nblocks * i.batch,
        i.x, i.x.stride(), dy, dy.stride(), i.B, i.B.stride(), i.C, i.C.stride(), i.D, strides(i.D), dt, dA_cumsum, i.seq_idx,
        dstates, dCB, dx, dx.stride(), parts, parts.stride()[1:], parts.stride(0), u_v_x, q, dD_tiles, i.seqlen, nblocks,
        i.nheads, i.ngroups, i.headdim, i.dstate, splits, options.exp2, options.precision,
        **(CONFIGS.pick(i).launch | {"BLOCK_M": span}))
    return dx, summed(parts, i.B, into_dB), None if dD_tiles is None else sum_first(dD_tiles, output(dD_tiles[0])), u_v_x, q
