"""What the Gluon kernels for Hopper share: small device functions.

A block walks runs of sub-chunks of two neighbouring heads of one group. A run is a row (batch, pair, first, last, piece,
npieces) of int32: sub-chunks first..last of heads 2 pair and 2 pair + 1; `piece` and `npieces` say which end states enter it,
or, where pieces are what is computed, `piece` which one it leaves. A block takes `nruns` rows, padded with empty runs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ssd.runtime.gluon_names import reinterpret

LOG2E = gl.constexpr(1.4426950408889634)
RUN = gl.constexpr(6)


@gluon.jit
def at_most(v, limit: gl.constexpr):
    """The smaller of v and a number, or NaN if v is: one instruction."""
    return gl.inline_asm_elementwise("min.NaN.f32 $0, $1, $2;", "=r,r,r", [v, limit], gl.float32, True, 1)


@gluon.jit
def decay(exponent):
    """2^exponent for one that is <= 0 but for rounding: clamped. NaN stays NaN."""
    return gl.exp2(at_most(exponent, 0.0))


@gluon.jit
def log2(v):
    """One instruction, where gl.log2 takes 25; relative error 2^-22, so that of a step of 1e-4 is 2e-6."""
    return gl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=r,r", [v], gl.float32, True, 1)


@gluon.jit
def load_run(runs, k):
    """Run k of the table: batch row, pair, first and last sub-chunk, piece, npieces."""
    run = runs + k * RUN
    return gl.load(run), gl.load(run + 1), gl.load(run + 2), gl.load(run + 3), gl.load(run + 4), gl.load(run + 5)


@gluon.jit
def load_steps(dA_cumsum, dt, at, m, BLOCK_M: gl.constexpr):
    """Of one sub-chunk of one head: dA_cumsum [M], dt [M] and the last dA_cumsum."""
    return gl.load(dA_cumsum + at + m), gl.load(dt + at + m), gl.load(dA_cumsum + at + BLOCK_M - 1)


@gluon.jit
def state_offsets(STATE: gl.constexpr, HEADDIM: gl.constexpr, DSTATE: gl.constexpr):
    """Offsets of a state [headdim, dstate] in memory."""
    p = gl.arange(0, HEADDIM, gl.SliceLayout(1, STATE))
    n = gl.arange(0, DSTATE, gl.SliceLayout(0, STATE))
    return gl.expand_dims(p, 1) * DSTATE + gl.expand_dims(n, 0)


@gluon.constexpr_function
def row_layout(dstate):
    """16 bytes or more of a row to a thread, and whole rows to a warp: for states in memory."""
    lanes = dstate // 8
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def given_state(states, bh, offsets, STATE: gl.constexpr, HEADDIM: gl.constexpr, DSTATE: gl.constexpr):
    """That of one row and head, [P, N] fp32; zero where none are given."""
    if states is None:
        state = gl.zeros([HEADDIM, DSTATE], gl.float32, STATE)
    else:
        state = gl.load(states + bh * HEADDIM * DSTATE + offsets).to(gl.float32)
    return state


@gluon.jit
def entering_state(state, ends, factors, piece, npieces, offsets, U: gl.constexpr, HEADDIM: gl.constexpr, DSTATE: gl.constexpr):
    """(28): the state before a run, [P, N] fp32, from the one given and the pieces before it in their order."""
    if ends is not None:
        for i in range(2 * piece + U, 2 * (piece + npieces) + U, 2):
            state = state * gl.load(factors + i) + gl.load(ends + i.to(gl.int64) * HEADDIM * DSTATE + offsets)
    return state


@gluon.jit
def tile(buffers, index, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Tile `index` of a ring of TMA buffers [1, ROWS, WIDTH], as [ROWS, WIDTH]."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], buffers.dtype)
    return reinterpret(buffers.index(index), [ROWS, WIDTH], LAYOUT)


@gluon.jit
def barriers(N: gl.constexpr, COUNT: gl.constexpr):
    """N mbarriers that COUNT arrivals complete."""
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars
