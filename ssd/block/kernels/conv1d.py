"""The causal depthwise convolution as a walk, docs/block.md, section "Causal convolution": what its kernels share.

A program of one warp takes BLOCK channels of a piece of one sequence and walks its tokens in order, STEP at a time. The
width - 1 rows that a token shares with those before it stay in registers, so every element is loaded once, and the rows of the
next STAGES - 1 steps are on their way to shared memory while this one is computed: in registers there is room for one, too few
bytes under way to keep the memory busy. A row is a vector [BLOCK] of channels; rows, weights and documents come in tuples.

x and dout are (batch, seqlen, dim) with contiguous channels. Their strides of batch and token come in units of FORM.unit
elements: Triton knows of a stride only whether 16 divides it, and wide loads need less. Positions count tokens from 0; the
initial states are positions -(width - 1) to -1.
"""

from math import gcd
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import cdiv
from ...kernels.device import LOG2E
from ...runtime import tuning

BLOCK = 128  # channels: 4 a thread. With 8, the backward's sums and rows would take the registers of all but 8 warps of an SM
STEP = 4  # tokens; at least width - 1, so that the rows kept for the next step are all of this one
STAGES = 4  # the step at hand and three ahead: the third is asked for when the first is done, so two are always under way
_SHORTEST = 32  # tokens of a piece; at the end of each, width - 1 rows are loaded twice
_START = 12  # tokens that a program would walk in the time in which its filter and its first rows come
_ROUNDS = 8  # of programs, at most
_ALIGNMENT = 16  # elements


class Strides(NamedTuple):
    """The strides of a walk's tensors, as one argument; () for those that are absent."""

    x: tuple[int, ...]  # of batch and token, in units of Form.unit
    weight: tuple[int, ...]
    initial_states: tuple[int, ...]
    dout: tuple[int, ...] = ()  # as x
    dfinal_states: tuple[int, ...] = ()
    dx: tuple[int, ...] = ()  # in units of Form.dx_unit


class Form(NamedTuple):
    """What a walk is compiled for, as one constexpr argument."""

    unit: int  # elements
    dim: int
    width: int
    silu: bool
    dx_unit: int = 1
    block: int = BLOCK
    step: int = STEP
    stages: int = STAGES


@triton.jit
def sigmoid(v):
    """1 / (1 + exp(-v)) to 2^-21, in 5 instructions: a division scales its operands first, which takes 3 more."""
    root = tl.math.rsqrt(1.0 + tl.math.exp2(v * -LOG2E))
    return root * root


@triton.jit
def locate(npieces, tokens, seqlen, FORM: tl.constexpr):
    """Of this program: its sequence (int64), the number of its piece among all, the piece's first token and the token after its
    last, the channels [BLOCK] and which of them exist. Programs of the same tokens are neighbours."""
    NTILES: tl.constexpr = (FORM.dim + FORM.block - 1) // FORM.block
    piece = tl.program_id(0) // NTILES
    first = piece % npieces * tokens
    channels = tl.program_id(0) % NTILES * FORM.block + tl.arange(0, FORM.block)
    return tl.cast(piece // npieces, tl.int64), piece, first, tl.minimum(first + tokens, seqlen), channels, channels < FORM.dim


@triton.jit
def load_filter(weight, strides, bias, channels, in_dim, WIDTH: tl.constexpr):
    """weight (dim, width), any strides, as WIDTH rows, and bias (dim,), zeros for None; all fp32."""
    weights = ()
    for i in tl.static_range(WIDTH):
        at = channels.to(tl.int64) * strides[0] + i * strides[1]
        weights += (tl.load(weight + at, mask=in_dim, other=0.0).to(tl.float32),)
    offset = tl.zeros([channels.shape[0]], tl.float32)
    if bias is not None:
        offset += tl.load(bias + channels, mask=in_dim, other=0.0).to(tl.float32)
    return weights, offset


@triton.jit
def load_rows(t, stride, token, end, channels, in_dim, STEP: tl.constexpr):
    """STEP tokens from `token` on, at which t points, as they are in memory; zeros from `end` on."""
    rows = ()
    for r in tl.static_range(STEP):
        rows += (tl.load(t + r * stride + channels, mask=in_dim & (token + r < end), other=0.0),)
    return rows


@triton.jit
def load_positions(x, stride, initial_states, strides, position, channels, in_dim, WIDTH: tl.constexpr):
    """WIDTH - 1 positions from `position` on, in fp32; zeros before token 0 without initial states. x points at the sequence.
    """
    rows = ()
    for i in tl.static_range(WIDTH - 1):
        p = tl.cast(position + i, tl.int64)
        row = tl.load(x + p * stride + channels, mask=in_dim & (p >= 0), other=0.0).to(tl.float32)
        if initial_states is not None:
            at = channels.to(tl.int64) * strides[1] + (p + WIDTH - 1) * strides[2]
            row += tl.load(initial_states + at, mask=in_dim & (p < 0), other=0.0).to(tl.float32)
        rows += (row,)
    return rows


@triton.jit
def load_documents(seq_idx, position, seqlen, COUNT: tl.constexpr):
    """Documents of COUNT positions, those before token 0 in its document; () without seq_idx, which points at the sequence."""
    documents = ()
    if seq_idx is not None:
        for i in tl.static_range(COUNT):
            token = tl.minimum(tl.maximum(position + i, 0), seqlen - 1)
            documents += (tl.load(seq_idx + token),)
    return documents


@triton.jit
def visible(rows, documents, first: tl.constexpr, own: tl.constexpr, WIDTH: tl.constexpr):
    """WIDTH rows from number `first` on, zero where their document is not that of row `own`."""
    taps = ()
    for i in tl.static_range(first, first + WIDTH):
        if len(documents) > 0 and i != own:
            # selected, not multiplied: another document may hold Inf or NaN
            taps += (tl.where(documents[i] == documents[own], rows[i], 0.0),)
        else:
            taps += (rows[i],)
    return taps


@triton.jit
def convolve(taps, weights, bias, WIDTH: tl.constexpr):
    """(C1): what a token is before its activation, from the rows that it sees, the oldest first."""
    pre = bias
    for i in tl.static_range(WIDTH):
        pre += weights[i] * taps[i]
    return pre


def count_in_units(*tensors: Tensor) -> tuple[int, list[tuple[int, ...]]]:
    """Form.unit, and for each tensor (batch, seqlen, dim) its strides of batch and token in units of it."""
    strides = [t.stride()[:2] for t in tensors]
    unit = gcd(_ALIGNMENT, *(stride for pair in strides for stride in pair))
    return unit, [tuple(stride // unit for stride in pair) for pair in strides]


def pieces(x: Tensor, warps: int, longest: int | None = None) -> tuple[int, int]:
    """Tokens of a piece, a multiple of STEP, and pieces of a sequence, so that the last program is done soonest.

    x: (batch, seqlen, dim). warps: programs that run side by side on an SM. longest: tokens of a piece at most.
    """
    batch, seqlen, dim = x.shape
    columns, side_by_side = batch * cdiv(dim, BLOCK), warps * tuning.current_device(x.device.index).sms

    def time(tokens: int) -> int:
        return cdiv(columns * cdiv(seqlen, tokens), side_by_side) * (tokens + _START)

    filling = (max(1, rounds * side_by_side // columns) for rounds in range(1, _ROUNDS + 1))  # pieces that fill whole rounds
    tokens = min((max(_SHORTEST, cdiv(cdiv(seqlen, n), STEP) * STEP) for n in filling), key=time)
    tokens = min(tokens, longest or tokens)
    return tokens, cdiv(seqlen, tokens)
