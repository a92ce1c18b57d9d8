"""Mamba-1's selective scan, docs/block.md, section "Selective scan": what its kernels share.

Sequences are cut into chunks of FORM.chunk tokens. Inside one, (S2) is a scan over pairs: a token takes the state h to
a h + b, and tokens in a row compose to a pair again.

u, delta, z and dout are (batch, dim, seqlen), B and C (batch, ngroups, dstate, seqlen), their tokens to be read FORM.unit at a
time, see `pad_to_units`; their other strides come in units of as many elements, or Triton would not know what divides them.
A (dim, dstate), D and delta_bias (dim,) have any strides. `dim / ngroups` channels share a group.
"""

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import cdiv
from ...kernels.device import sigmoid, softplus
from ...runtime.tuning import next_power_of_2

_TILE = 4096  # elements [dstate, chunk]: 16 a thread of 8 warps
_LANES, _SHORTEST = 32, 16
LARGEST_STATE = 256
CHANNELS = 4  # of a program that walks, one a warp: B and C of a token are loaded once for them


def unit_of(seqlen: int) -> int:
    """Form.unit: tokens that a thread reads at once."""
    return 4 if seqlen % 8 else 8


def chunk_of(seqlen: int, dstate: int) -> int:
    """Form.chunk: what a warp reads at once, unless a channel's tile of states is too large for it, or the sequence short."""
    most = min(_LANES * unit_of(seqlen), max(_SHORTEST, _TILE // next_power_of_2(dstate)))
    chunk = min(most, _SHORTEST)
    while chunk < most and chunk < seqlen:  # in comparisons, which torch.compile need not know a seqlen for
        chunk *= 2
    return chunk


def walkers(batch: int, dim: int, ngroups: int) -> int:
    """Programs that together walk every channel, see `locate`."""
    return cdiv(dim // ngroups, CHANNELS) * ngroups * batch


def pad_to_units(*tensors: Tensor | None) -> tuple[list[Tensor | None], list[tuple[int, ...]]]:
    """Tensors (..., seqlen), or copies with zeros behind their rows, where these begin and end with whole units; and their
    strides in units, but for the last, 1.
    """
    given, strides = [], []
    for t in tensors:
        unit = 1 if t is None else unit_of(t.shape[-1])
        if t is not None and (t.stride(-1) != 1 or t.shape[-1] % unit or any(stride % unit for stride in t.stride()[:-1])):
            t = F.pad(t, (0, -t.shape[-1] % unit)).contiguous()
        given.append(t)
        strides.append(() if t is None else tuple(stride // unit for stride in t.stride()[:-1]))
    return given, strides


@triton.jit
def locate(FORM: tl.constexpr):
    """Of a program that walks FORM.channels channels of one group: the batch row, the group, the channels [D, 1], all int64;
    whether channels exist, of which one that does not stands for the group's first; and the tokens of a chunk [D, T].

    The tokens are the same in every row: so each warp loads B and C for itself, and none waits for another.
    """
    EACH: tl.constexpr = FORM.dim // FORM.ngroups
    TILES: tl.constexpr = (EACH + FORM.channels - 1) // FORM.channels
    g, b = tl.program_id(0) // TILES % FORM.ngroups, tl.program_id(0) // (TILES * FORM.ngroups)
    in_group = tl.program_id(0) % TILES * FORM.channels + tl.arange(0, FORM.channels)[:, None]
    in_d = in_group < EACH
    d = g * EACH + tl.where(in_d, in_group, 0)
    offs_t = tl.arange(0, FORM.chunk)[None, :] + tl.full([FORM.channels, 1], 0, tl.int32)
    return b.to(tl.int64), g.to(tl.int64), d.to(tl.int64), in_d, offs_t


@triton.jit
def compose(a, b, a_after, b_after):
    """The pair of two tokens, or rows of tokens, one after the other."""
    return a * a_after, b * a_after + b_after


@triton.jit
def suffixes(a, b, after, LOG_LANES: tl.constexpr):
    """h[t] = a[t] h[t + 1] + b[t] along the rows of tiles [N, T], with h[T] = after [N].

    Not by tl.associative_scan with reverse=True, which turns rows around with five shuffles an element, there and back. Here
    neighbouring tokens of one thread are turned around in its registers, for nothing, and only their totals pass between
    2^LOG_LANES threads.
    """
    N: tl.constexpr = a.shape[0]
    T: tl.constexpr = a.shape[1]
    LANES: tl.constexpr = 1 << LOG_LANES
    EACH: tl.constexpr = T // LANES
    a, b = tl.flip(tl.reshape(a, [N, LANES, EACH]), 2), tl.flip(tl.reshape(b, [N, LANES, EACH]), 2)
    a, b = tl.associative_scan((a, b), 2, compose)
    whole = tl.arange(0, EACH)[None, None, :] == EACH - 1
    a_lane, b_lane = tl.sum(tl.where(whole, a, 0.0), 2), tl.sum(tl.where(whole, b, 0.0), 2)
    lanes = tl.arange(0, LANES)[None, :] + tl.zeros([N, 1], tl.int32)
    for k in tl.static_range(LOG_LANES):
        inside = lanes + (1 << k) < LANES
        from_there = tl.where(inside, lanes + (1 << k), lanes)
        a_after, b_after = tl.gather(a_lane, from_there, 1), tl.gather(b_lane, from_there, 1)
        b_lane = tl.where(inside, b_lane + a_lane * b_after, b_lane)
        a_lane = tl.where(inside, a_lane * a_after, a_lane)
    h = b_lane + a_lane * after[:, None]  # at the first token of each lane
    entering = tl.where(lanes == LANES - 1, after[:, None], tl.gather(h, tl.minimum(lanes + 1, LANES - 1), 1))
    return tl.reshape(tl.flip(b + a * entering[:, :, None], 2), [N, T])


@triton.jit
def finite(rate):
    """A rate that a step of 0, as after the last token, does not make NaN of."""
    return tl.maximum(rate, -1e30, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load_tokens(t, first, offs_t, seqlen, FORM: tl.constexpr):
    """Tokens first + offs_t of a row that t points at: [T] fp32, or [D, T] for a column of rows; 0 after the last unit."""
    tokens = tl.cast(first, tl.int64) + offs_t
    return tl.load(t + tokens, mask=tokens // FORM.unit < (seqlen + FORM.unit - 1) // FORM.unit, other=0.0).to(tl.float32)


@triton.jit
def load_step(delta, bias, first, offs_t, seqlen, FORM: tl.constexpr):
    """(S1): delta with its bias, and the step, which is 0 after the last token and so changes no state."""
    raw = load_tokens(delta, first, offs_t, seqlen, FORM) + bias
    step = softplus(raw) if FORM.softplus else raw
    return raw, tl.where(first + offs_t < seqlen, step, 0.0)


@triton.jit
def gate_and_slope(z):
    """silu(z), and its derivative."""
    s = sigmoid(z)
    return z * s, s * (1.0 + z * (1.0 - s))
