"""Mamba-1's selective scan, token by token, in Gluon: what its forward and backward share (docs/block.md, "The walk").

A program is one warp that walks the tokens of FORM.channels channels of one group of one batch row. The states [channels,
dstate] of these stay in registers: a thread holds R channels and a part of their states, neighbouring lanes the rest of these.
What a token has is read from shared memory, where tiles of FORM.chunk tokens lie with tokens outermost; they come from memory
along tokens.

u, delta, z, dout (batch, dim, seqlen), B and C (batch, ngroups, dstate, seqlen) have contiguous tokens and otherwise any
strides, given in units of FORM.unit elements, see `choose_unit`. A (dim, dstate), D and delta_bias (dim,) have any strides.
"""

import math

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...runtime.gluon_names import reinterpret
from ...runtime.tuning import next_power_of_2

LOG2E = gl.constexpr(1.4426950408889634)
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_PROGRAMS = 1024  # two warps for each scheduler of a large GPU
_LARGE = 1 << 28  # bytes of partial sums


def channels_and_rows(batch: int, dim: int, seqlen: int, dstate: int) -> tuple[int, int]:
    """Form.channels of a program and R of a thread: small warps where channels are few, since a token takes a warp less time
    the fewer it has. Larger ones where the partial sums of dB and dC, 8 bytes for each program's tokens and states, would be
    large; but the largest only where there are enough of them: fewer take twice the time (docs/log/selective-scan.md).
    """
    channels = 64 // columns(dstate)  # a thread has two states: of one Triton's compiler complains
    while channels < 16 and batch * dim // channels >= _PROGRAMS:
        channels *= 2
    most = 32 if batch * dim // 32 >= _PROGRAMS else 16
    while channels < most and batch * dim * seqlen * dstate * 8 // channels >= _LARGE:
        channels *= 2
    return channels, 2 if channels == 32 else 1


def columns(dstate: int) -> int:
    """Form.columns, what tiles of states are padded to: all lanes that share channels have some."""
    return max(4, next_power_of_2(dstate))


def choose_unit(*tensors: Tensor | None) -> tuple[int, list[Tensor | None], list[tuple[int, ...]]]:
    """Form.unit; tensors (..., seqlen), copied if their tokens are not contiguous; and their strides in units but for the last.

    The unit, at most 8, divides seqlen and all strides, which Triton could not tell from their products.
    """
    given = [t if t is None or t.stride(-1) == 1 else t.contiguous() for t in tensors]
    present = [t for t in given if t is not None]
    unit = math.gcd(8, present[0].shape[-1], *[stride for t in present for stride in t.stride()[:-1]])
    return unit, given, [() if t is None else tuple([stride // unit for stride in t.stride()[:-1]]) for t in given]


@gluon.constexpr_function
def lanes_and_states(channels, rows, dstate):
    """The layout of states [channels, dstate] in a warp, `rows` channels a thread."""
    lanes = 32 * rows // channels
    return gl.BlockedLayout([rows, max(1, dstate // lanes)], [32 // lanes, lanes], [1, 1], [1, 0])


@gluon.constexpr_function
def tile_layout(rows, tokens):
    """The layout of tiles [channels or states, tokens] that come from memory: to a lane its own channel, whose tokens it writes
    to shared memory beside those of its neighbours, without bank conflicts.
    """
    return gl.BlockedLayout([1, max(1, rows * tokens // 32)], [min(32, rows), max(1, 32 // rows)], [1, 1], [1, 0])


@gluon.jit
def exp2(v):
    """One instruction."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [v], gl.float32, True, 1)


@gluon.jit
def sigmoid(v):
    e = exp2(v * -LOG2E)
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [1.0 + e], gl.float32, True, 1)


@gluon.jit
def softplus(v):
    """max(v, 0) + log(1 + e), e = exp(-|v|): the logarithm over e by a polynomial for 0 <= e <= 1, relative error 2e-7."""
    e = exp2(gl.abs(v) * -LOG2E)
    p = -0.00324398093 * e + 0.0198512636
    p = p * e - 0.0569591597
    p = p * e + 0.106036171
    p = p * e - 0.153055698
    p = p * e + 0.196759313
    p = p * e - 0.249541327
    p = p * e + 0.333299637
    p = p * e - 0.499999017
    p = p * e + 1.0
    return gl.where(v > 0, v, 0.0) + p * e


@gluon.jit
def step_of(raw, first, tokens, seqlen, FORM: gl.constexpr):
    """(S1), of delta with its bias; 0 after the last token, and so changes no state."""
    step = raw
    if FORM.softplus:
        step = softplus(raw)
    return gl.where(gl.expand_dims(first + tokens < seqlen, 0), step, 0.0)


@gluon.jit
def locate(FORM: gl.constexpr, TILE: gl.constexpr, SHARED_TILE: gl.constexpr):
    """Of this program: its batch row and group, int64, and its first channel in the group; channels d [channels], states n
    [dstate], int64, and which of them exist; and the tokens of a tile, as tiles of channels and of states have them.
    """
    EACH: gl.constexpr = FORM.dim // FORM.ngroups
    PROGRAMS: gl.constexpr = (EACH + FORM.channels - 1) // FORM.channels
    number = gl.program_id(0)
    g, b = number // PROGRAMS % FORM.ngroups, number // (PROGRAMS * FORM.ngroups)
    b, g, first_channel = b.to(gl.int64), g.to(gl.int64), number % PROGRAMS * FORM.channels
    k = first_channel + gl.arange(0, FORM.channels, gl.SliceLayout(1, TILE))
    d, in_d = g * EACH + k, k < EACH
    n = gl.arange(0, FORM.columns, gl.SliceLayout(1, SHARED_TILE)).to(gl.int64)
    in_n, tokens = n < FORM.dstate, gl.arange(0, FORM.chunk, gl.SliceLayout(0, TILE))
    return b, g, first_channel, d, in_d, n, in_n, tokens, gl.arange(0, FORM.chunk, gl.SliceLayout(0, SHARED_TILE))


@gluon.jit
def load_of_channels(t, strides, d, in_d):
    """What t has for channels d, [channels, 1] fp32; 0 if it is None."""
    value = 0.0
    if t is not None:
        value = gl.expand_dims(gl.load(t + d * strides[0], mask=in_d, other=0.0).to(gl.float32), 1)
    return value


@gluon.jit
def load_rates(A, strides, d, in_d, FORM: gl.constexpr, STATES: gl.constexpr):
    """log2(e) A of channels d [channels], [channels, dstate]. A step of 0, as after the last token, makes no NaN of an infinite
    one.
    """
    n = gl.arange(0, FORM.columns, gl.SliceLayout(0, STATES)).to(gl.int64)
    inside = gl.expand_dims(in_d, 1) & gl.expand_dims(n < FORM.dstate, 0)
    at = gl.expand_dims(d.to(gl.int64) * strides[0], 1) + gl.expand_dims(n * strides[1], 0)
    rate = gl.load(A + at, mask=inside, other=0.0).to(gl.float32)
    return gl.inline_asm_elementwise("max.NaN.f32 $0, $1, $2;", "=r,r,r", [rate, -1e30], gl.float32, True, 1) * LOG2E


@gluon.jit
def row_pointers(t, strides, b, rows, tokens, FORM: gl.constexpr):
    """Pointers [rows, tokens] at `tokens` of rows of batch row b."""
    start = (b * strides[0] + rows * strides[1]) * FORM.unit
    return t + gl.expand_dims(start, 1) + gl.expand_dims(tokens, 0)


@gluon.jit
def state_pointers(t, strides, b, g, n, tokens, FORM: gl.constexpr):
    """Pointers [dstate, tokens] at `tokens` of states n of B or C, of batch row b and group g."""
    return row_pointers(t + g * strides[1] * FORM.unit, (strides[0], strides[2]), b, n, tokens, FORM)


@gluon.jit
def locate_states(g, first_channel, FORM: gl.constexpr, STATES: gl.constexpr):
    """Where a program's states are: channels d [channels], whether they are of group g, states n [dstate]; offsets [channels,
    dstate] in the (dim, dstate) of a batch row, and which of these exist.
    """
    EACH: gl.constexpr = FORM.dim // FORM.ngroups
    k = first_channel + gl.arange(0, FORM.channels, gl.SliceLayout(1, STATES))
    d, in_d = g.to(gl.int32) * EACH + k, k < EACH
    n = gl.arange(0, FORM.columns, gl.SliceLayout(0, STATES))
    at = gl.expand_dims(d * FORM.dstate, 1) + gl.expand_dims(n, 0)
    return d, in_d, n, at, gl.expand_dims(in_d, 1) & gl.expand_dims(n < FORM.dstate, 0)


@gluon.jit
def contiguous(rows, tokens, seqlen, FORM: gl.constexpr):
    """Offsets [rows, tokens] in a contiguous tensor (rows, seqlen)."""
    return gl.expand_dims(rows * (seqlen // FORM.unit) * FORM.unit, 1) + gl.expand_dims(tokens, 0)


@gluon.jit
def load_tile(pointers, first, in_rows, tokens, seqlen, FORM: gl.constexpr):
    """A tile [rows, tokens] from token `first` on; zeros where there is nothing. The unit divides seqlen: the mask shows it."""
    inside = gl.expand_dims(in_rows, 1) & gl.expand_dims((first + tokens) // FORM.unit < seqlen // FORM.unit, 0)
    return gl.load(pointers + first, mask=inside, other=0.0)


@gluon.jit
def store_tile(t, offsets, first, in_rows, tokens, seqlen, value, FORM: gl.constexpr):
    """The same of a contiguous tensor. `first` goes to the offsets, which tensors share: pointers would fill registers."""
    inside = gl.expand_dims(in_rows, 1) & gl.expand_dims((first + tokens) // FORM.unit < seqlen // FORM.unit, 0)
    gl.store(t + (offsets + first), value.to(t.dtype.element_ty), mask=inside)


@gluon.jit
def tokens_last(buffer):
    """A buffer [tokens, width], that a walk indexes by its token, as one tile [width, tokens]."""
    TOKENS: gl.constexpr = buffer.shape[0]
    WIDTH: gl.constexpr = buffer.shape[1]
    return reinterpret(buffer, [TOKENS, WIDTH], ROWS).permute((1, 0))


@gluon.jit
def of_channels(buffer, t, STATES: gl.constexpr):
    """Row t of a buffer [tokens, channels], as [channels, 1]."""
    return gl.expand_dims(buffer.index(t).load(gl.SliceLayout(1, STATES)), 1)


@gluon.jit
def of_states(buffer, t, STATES: gl.constexpr):
    """Row t of a buffer [tokens, dstate], as [1, dstate]."""
    return gl.expand_dims(buffer.index(t).load(gl.SliceLayout(0, STATES)), 0)


@gluon.jit
def append(values, value):
    return values + (value,)  # noqa: RUF005  Triton knows no starred expressions


@gluon.jit
def prepend(value, values):
    return (value,) + values  # noqa: RUF005


@gluon.jit
def stack(values):
    """Four tensors [...], of a token each, as one [..., 2, 2]."""
    return gl.join(gl.join(values[0], values[2]), gl.join(values[1], values[3]))


@gluon.jit
def store_turn(buffer, turn, value):
    """What a turn has, [WIDTH, 2, 2], into its four rows of a buffer [tokens, WIDTH]."""
    TURNS: gl.constexpr = buffer.shape[0] // 4
    WIDTH: gl.constexpr = buffer.shape[1]
    rows = reinterpret(buffer, [TURNS, 4, WIDTH], ROWS).index(turn)
    rows.permute((1, 0)).store(gl.reshape(value, [WIDTH, 4]))
