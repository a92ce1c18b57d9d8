"""The state before a run, in Gluon, for Hopper: given by the caller, added up from pieces, or one of those in memory."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .early import wait_for_last
from .roles import load_masked, locate_state, log2, state_mask


class Start(NamedTuple):
    """Where a run's first state comes from: `starts`, or initial_states and the pieces before it. Each may be None.

    ends_desc: descriptor of ends, where they come as tiles do.
    """

    initial_states: gl.tensor
    ends: gl.tensor
    factors: gl.tensor
    starts: gl.tensor
    ends_desc: gl.tensor


@gluon.jit
def locate_slice(ends, i, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Where slice i of what pieces leave begins. Behind its elements is a column of exponents, see `store_end`."""
    return ends + i.to(gl.int64) * (ROWS * (WIDTH + 1))


@gluon.constexpr_function
def count_together(dtype):
    """Elements of 16 bytes, which a thread reads or writes at once."""
    return 8 if dtype == gl.float16 else 4


@gluon.constexpr_function
def line_layout(dtype):
    return gl.BlockedLayout([count_together(dtype)], [32], [4], [0])


@gluon.jit
def locate_end(ends, i, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Where slice i of what pieces leave is, pointers [ROWS * WIDTH]: in the order of `line_up`."""
    return locate_slice(ends, i, ROWS, WIDTH) + gl.arange(0, ROWS * WIDTH, line_layout(ends.dtype.element_ty))


@gluon.jit
def line_up(state, TOGETHER: gl.constexpr):
    """A state [64, N] in an accumulator's layout as [64 N]: 16 bytes of one thread, then of the next. Elements stay in their
    threads, so this costs no instruction.
    """
    gl.static_assert(state.shape[0] == 64)
    COLUMNS: gl.constexpr = state.shape[1]
    # of rows: warp, half of its 16, one of 8; of columns: 16 bytes, 8 columns, thread, pair
    t = gl.reshape(state, [4, 2, 8, COLUMNS // (2 * TOGETHER), TOGETHER // 4, 4, 2])
    return gl.reshape(gl.permute(t, (3, 0, 2, 5, 4, 1, 6)), [64 * COLUMNS])


@gluon.jit
def undo_line_up(line, TOGETHER: gl.constexpr, LAYOUT: gl.constexpr):
    """What `line_up` made of a state."""
    COLUMNS: gl.constexpr = line.shape[0] // 64
    t = gl.reshape(line, [COLUMNS // (2 * TOGETHER), 4, 8, 4, TOGETHER // 4, 2, 2])
    return gl.convert_layout(gl.reshape(gl.permute(t, (1, 5, 2, 0, 4, 3, 6)), [64, COLUMNS]), LAYOUT)


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
    line = line_up(state.to(ends.dtype.element_ty), count_together(ends.dtype.element_ty))
    gl.store(locate_end(ends, i, ROWS, WIDTH), gl.convert_layout(line, line_layout(ends.dtype.element_ty)))


@gluon.jit
def load_scales(ends, i, LAYOUT: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """By what the rows of slice i in fp16 are multiplied, [ROWS, 1] fp32."""
    return gl.expand_dims(gl.exp2(gl.load(locate_exponents(ends, i, LAYOUT, ROWS, WIDTH)).to(gl.float32)), 1)


@gluon.jit
def load_end(ends, i, LAYOUT: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """What `store_end` left, fp32."""
    line = gl.load(locate_end(ends, i, ROWS, WIDTH))
    end = undo_line_up(line, count_together(ends.dtype.element_ty), LAYOUT).to(gl.float32)
    if ends.dtype.element_ty == gl.float16:
        end *= load_scales(ends, i, LAYOUT, ROWS, WIDTH)
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
               PART: gl.constexpr = 0, PARTS: gl.constexpr = 1):
    """Equation (28): slice U of a pair [P, N] fp32 before a run, from that before the pieces that enter the run.

    ends (npieces, 2, ROWS * (WIDTH + 1)), factors (npieces, 2) fp32: what each piece adds, as `store_end` leaves it, and its
    decay; None if there are no pieces. Where pieces have PARTS, side by side, PART is added.
    """
    if ends is not None:
        if run.npieces > 0:
            wait_for_last()
        lanes: gl.constexpr = 2 * PARTS
        lane: gl.constexpr = 2 * PART + U
        for i in range(lanes * run.piece + lane, lanes * (run.piece + run.npieces) + lane, lanes):
            state = state * gl.load(factors + i) + load_end(ends, i, STATE, ROWS, WIDTH)
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
def load_start(start, run, h, bh, work, SLICE: gl.constexpr, PART: gl.constexpr, EVERY: gl.constexpr, STATE: gl.constexpr,
               form: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """A slice [P, N] fp32 of a part of the state of head h before a run, but for what pieces add."""
    if start.starts is not None:
        state = load_kept_state(start.starts, run.b, h, run.first, work, EVERY, STATE, SLICE, PART, form, ROWS, WIDTH)
    else:
        state = load_given_state(start.initial_states, bh, STATE, SLICE, PART, form, ROWS, WIDTH)
    return state
