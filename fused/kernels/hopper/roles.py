"""What the roles of the Gluon kernels for Hopper share: small device functions.

A block walks runs: parts of the sequences of two neighbouring heads of one group, in sub-chunks of 64 tokens. Which runs a
block walks stands in a table (blocks, nruns, 6) int32, padded with empty runs; `Run` names its columns.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssd.runtime.gluon_names import reinterpret

LOG2E = gl.constexpr(1.4426950408889634)
RUN_FIELDS = gl.constexpr(6)


class Run(NamedTuple):
    """Sub-chunks first to last (exclusive) of heads 2 pair and 2 pair + 1 of row b.

    piece, npieces: the pieces of the sequence before the run whose end states enter it, npieces of them from number `piece` on;
    of a run that computes a piece, `piece` is its number.
    """

    b: gl.tensor
    pair: gl.tensor
    first: gl.tensor
    last: gl.tensor
    piece: gl.tensor
    npieces: gl.tensor


@gluon.jit
def load_run(runs, k):
    """Run k of the table."""
    run = runs + k * RUN_FIELDS
    return Run(gl.load(run), gl.load(run + 1), gl.load(run + 2), gl.load(run + 3), gl.load(run + 4), gl.load(run + 5))


@gluon.jit
def clamp_to(v, limit: gl.constexpr):
    """The smaller of v and a number, or NaN if v is: one instruction."""
    return gl.inline_asm_elementwise("min.NaN.f32 $0, $1, $2;", "=r,r,r", [v, limit], gl.float32, True, 1)


@gluon.jit
def decay(exponent):
    """2^exponent of an exponent that only rounding makes positive: clamped at 0. NaN stays NaN."""
    return gl.exp2(clamp_to(exponent, 0.0))


@gluon.jit
def log2(v):
    """One instruction, where gl.log2 takes 25; relative error 2^-22, so that of a step of 1e-4 is 2e-6."""
    return gl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=r,r", [v], gl.float32, True, 1)


@gluon.jit
def load_steps(dA_cumsum, dt, at, m, BLOCK_M: gl.constexpr):
    """Of the sub-chunk of one head at offset `at`: dA_cumsum [M], dt [M], and the last dA_cumsum."""
    return gl.load(dA_cumsum + at + m), gl.load(dt + at + m), gl.load(dA_cumsum + at + BLOCK_M - 1)


@gluon.jit
def state_offsets(STATE: gl.constexpr, HEADDIM: gl.constexpr, DSTATE: gl.constexpr):
    """Offsets of a state's elements [headdim, dstate] in memory."""
    p = gl.arange(0, HEADDIM, gl.SliceLayout(1, STATE))
    n = gl.arange(0, DSTATE, gl.SliceLayout(0, STATE))
    return gl.expand_dims(p, 1) * DSTATE + gl.expand_dims(n, 0)


@gluon.constexpr_function
def row_layout(dstate):
    """A layout for states in memory: a thread has 16 bytes or more of a row, a warp whole rows."""
    lanes = dstate // 8
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def load_given_state(states, bh, offsets, STATE: gl.constexpr, HEADDIM: gl.constexpr, DSTATE: gl.constexpr):
    """The state [P, N] fp32 that the caller gave for row and head bh; zero if `states` is None."""
    if states is None:
        state = gl.zeros([HEADDIM, DSTATE], gl.float32, STATE)
    else:
        state = gl.load(states + bh * HEADDIM * DSTATE + offsets).to(gl.float32)
    return state


@gluon.jit
def add_pieces(state, ends, factors, run, offsets, U: gl.constexpr, HEADDIM: gl.constexpr, DSTATE: gl.constexpr):
    """Equation (28): the state [P, N] fp32 before a run of head U of its pair, from that before the pieces that enter the run.

    ends (npieces, 2, headdim, dstate), factors (npieces, 2): what each piece adds, and its decay; None if there are no pieces.
    """
    if ends is not None:
        for i in range(2 * run.piece + U, 2 * (run.piece + run.npieces) + U, 2):
            state = state * gl.load(factors + i) + gl.load(ends + i.to(gl.int64) * HEADDIM * DSTATE + offsets)
    return state


@gluon.jit
def get_tile(tiles, slot, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Tile `slot` of tiles [slots, 1, ROWS, WIDTH], which the TMA fills or reads, as [ROWS, WIDTH]."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], tiles.dtype)
    return reinterpret(tiles.index(slot), [ROWS, WIDTH], LAYOUT)
