"""The state before a run, in Gluon, for Hopper: given by the caller, added up from pieces, or one of those in memory."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .early import wait_for_last
from .roles import load_masked, locate_state, log2, state_mask


class Start(NamedTuple):
    """Where a run's first state comes from: `starts`, or initial_states and the pieces before it. Each may be None."""

    initial_states: gl.tensor
    ends: gl.tensor
    factors: gl.tensor
    starts: gl.tensor


@gluon.jit
def locate_slice(ends, i, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Where slice i of what pieces leave begins. Behind its elements is a column of exponents, see `store_end`."""
    return ends + i.to(gl.int64) * (ROWS * (WIDTH + 1))


@gluon.jit
def locate_end(ends, i, LAYOUT: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, COLUMNS: gl.constexpr,
               FIRST: gl.constexpr = 0):
    """Where columns FIRST to FIRST + COLUMNS of slice i of what pieces leave are, pointers [ROWS, COLUMNS].

    Elements lie in the order in which a warpgroup's threads hold those of an accumulator: a warp reads or writes whole lines.
    """
    gl.static_assert(ROWS == 64)
    p, n = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    rows, columns = p // 16 * 64 + p % 16 // 8 * 256 + p % 8 * 8, (FIRST + n) // 8 * 512 + n % 8
    return (locate_slice(ends, i, ROWS, WIDTH) + gl.expand_dims(rows, 1)) + gl.expand_dims(columns, 0)


@gluon.jit
def locate_exponents(ends, i, LAYOUT: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Where the exponents of rows of slice i are, pointers [ROWS]."""
    return locate_slice(ends, i, ROWS, WIDTH) + ROWS * WIDTH + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))


@gluon.jit
def store_end(ends, i, state, LAYOUT: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Slice i [P, N] of what a piece leaves: in fp32, or in fp16 times a power of two for each row, whose exponent is stored
    too. So it rounds eight times as finely as bf16, and numbers down to 2^-28 of the largest of their row as finely as that.
    """
    if ends.dtype.element_ty == gl.float16:
        most = gl.max(gl.abs(state), 1)
        exponent = log2(gl.where(most > 1e-30, most, 1e-30)).to(gl.int32).to(gl.float32) - 14.0  # fp16 ends at 2^16
        state = state * gl.expand_dims(gl.exp2(-exponent), 1)
        gl.store(locate_exponents(ends, i, LAYOUT, ROWS, WIDTH), exponent.to(gl.float16))
    gl.store(locate_end(ends, i, LAYOUT, ROWS, WIDTH, WIDTH), state.to(ends.dtype.element_ty))


@gluon.jit
def load_end(ends, i, LAYOUT: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, COLUMNS: gl.constexpr,
             FIRST: gl.constexpr):
    """Columns FIRST to FIRST + COLUMNS of what `store_end` left, fp32."""
    end = gl.load(locate_end(ends, i, LAYOUT, ROWS, WIDTH, COLUMNS, FIRST)).to(gl.float32)
    if ends.dtype.element_ty == gl.float16:
        end *= gl.expand_dims(gl.exp2(gl.load(locate_exponents(ends, i, LAYOUT, ROWS, WIDTH)).to(gl.float32)), 1)
    return end


@gluon.constexpr_function
def row_layout(dstate):
    """A layout for states in memory: a thread has 16 bytes or more of a row, a warp whole rows."""
    lanes = dstate // 8
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def load_given_state(states, bh, STATE: gl.constexpr, SLICE: gl.constexpr, part, form: gl.constexpr, ROWS: gl.constexpr,
                     WIDTH: gl.constexpr):
    """A slice [P, N] fp32 of a part of the state that the caller gave for row and head bh; zero if `states` is None."""
    if states is None:
        state = gl.zeros([ROWS, WIDTH], gl.float32, STATE)
    else:
        at = locate_state(states, bh, STATE, SLICE, part, form, ROWS, WIDTH)
        state = load_masked(at, state_mask(STATE, SLICE, part, form, ROWS, WIDTH)).to(gl.float32)
    return state


@gluon.jit
def add_pieces(state, ends, factors, run, STATE: gl.constexpr, U: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr,
               PART: gl.constexpr = 0, PARTS: gl.constexpr = 1, WHOLE: gl.constexpr = False):
    """Equation (28): slice U of a pair [P, N] fp32 before a run, from that before the pieces that enter the run.

    ends (npieces, 2, ROWS * (WIDTH + 1)), factors (npieces, 2) fp32: what each piece adds, as `store_end` leaves it, and its
    decay; None if there are no pieces.
    PARTS: how many parts each piece has, of which PART is added: side by side, or with WHOLE the columns of one end.
    """
    if ends is not None:
        if run.npieces > 0:
            wait_for_last()
        lanes: gl.constexpr = 2 if WHOLE else 2 * PARTS
        lane: gl.constexpr = U if WHOLE else 2 * PART + U
        width: gl.constexpr = PARTS * WIDTH if WHOLE else WIDTH
        for i in range(lanes * run.piece + lane, lanes * (run.piece + run.npieces) + lane, lanes):
            end = load_end(ends, i, STATE, ROWS, width, WIDTH, PART * WIDTH if WHOLE else 0)
            state = state * gl.load(factors + i) + end
    return state


@gluon.jit
def load_kept_state(starts, b, h, c, work, EVERY: gl.constexpr, STATE: gl.constexpr, SLICE: gl.constexpr, PART: gl.constexpr,
                    form: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """A slice [P, N] fp32 of a part of the state before the chunk of sub-chunk c."""
    LAYOUT: gl.constexpr = row_layout(WIDTH)
    row = (b * ((work.nsub + EVERY - 1) // EVERY) + c // EVERY).to(gl.int64) * work.nheads + h
    at = locate_state(starts, row, LAYOUT, SLICE, PART, form, ROWS, WIDTH)
    return gl.convert_layout(load_masked(at, state_mask(LAYOUT, SLICE, PART, form, ROWS, WIDTH)), STATE).to(gl.float32)


@gluon.jit
def load_start(start, run, h, bh, work, U: gl.constexpr, SLICE: gl.constexpr, PART: gl.constexpr, EVERY: gl.constexpr,
               STATE: gl.constexpr, form: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, WHOLE: gl.constexpr = False):
    """A slice [P, N] fp32 of a part of the state of head h before a run. WHOLE: as `add_pieces` has it."""
    if start.starts is not None:
        state = load_kept_state(start.starts, run.b, h, run.first, work, EVERY, STATE, SLICE, PART, form, ROWS, WIDTH)
    else:
        state = load_given_state(start.initial_states, bh, STATE, SLICE, PART, form, ROWS, WIDTH)
        state = add_pieces(state, start.ends, start.factors, run, STATE, U, ROWS, WIDTH, PART, form.PARTS, WHOLE)
    return state
