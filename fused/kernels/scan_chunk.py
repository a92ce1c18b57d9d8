"""scan_chunk, equations (26), (27) and (5): the tile of a scan whose states between chunks are in memory."""

import triton
import triton.language as tl

from .walk import state_tile, walk


@triton.jit
def scan_chunk(tile, h, c, b, x, x_strides, z, z_strides, B, B_strides, C, C_strides, CB, D, D_strides, dt, dA_cumsum, seq_idx,
               prev_states, out, y, seqlen, nchunks, NHEADS: tl.constexpr, NGROUPS: tl.constexpr, HEADDIM: tl.constexpr,
               DSTATE: tl.constexpr, CHUNK: tl.constexpr, EXP2: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
               BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    """Writes out, and y unless it is None, of chunk c and the `tile`-th block of headdim.

    prev_states (batch, nchunks, nheads, headdim, dstate) is the state before each chunk; the rest as `walk` has it.
    """
    offs_n, offs_p = tl.arange(0, BLOCK_N), tile * BLOCK_P + tl.arange(0, BLOCK_P)
    at, inside = state_tile(offs_n, offs_p, HEADDIM, DSTATE)
    before = ((b * nchunks + c) * NHEADS + h) * HEADDIM * DSTATE
    state = tl.load(prev_states + before + at, mask=inside, other=0.0).to(tl.float32)
    first = c.to(tl.int32) * CHUNK
    walk(state, first, tl.minimum(first + CHUNK, seqlen), b, h, offs_n, offs_p, x, x_strides, z, z_strides, B, B_strides, C,
         C_strides, CB, D, D_strides, dt, dA_cumsum, seq_idx, None, out, y, seqlen, nchunks, NHEADS, NGROUPS, HEADDIM, DSTATE,
         CHUNK, EXP2, PRECISION, BLOCK_M)
