"""Mamba-1's selective scan, docs/block.md, section "Selective scan": what its kernels share.

Sequences are cut into chunks of CHUNK tokens. Inside one, (S2) is a scan over pairs: a token takes the state h to a h + b, and
tokens in a row compose to a pair again.

u, delta, z, dout (batch, dim, seqlen), B and C (batch, ngroups, dstate, seqlen), A (dim, dstate), D and delta_bias (dim,) may
have any strides; tokens are read together, so that seqlen is best contiguous. `dim / ngroups` channels share a group.
"""

import triton
import triton.language as tl

from ...device import sigmoid, softplus
from ...tuning import next_power_of_2

_TILE = 4096  # elements [dstate, CHUNK]: 16 a thread of 8 warps
_LONGEST, _SHORTEST = 256, 16


def chunk_of(seqlen: int, dstate: int) -> int:
    """CHUNK: as long as the tile of a channel's states fits registers, and no longer than a sequence."""
    most = min(_LONGEST, max(_SHORTEST, _TILE // next_power_of_2(dstate)))
    return min(most, max(_SHORTEST, next_power_of_2(seqlen)))


@triton.jit
def locate(DIM: tl.constexpr, NGROUPS: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr):
    """Of a program that walks CHANNELS channels of one group: the batch row, its group, the channels [D, 1] and whether they
    exist, and the tokens of a chunk [D, T]. Row and channels are int64. One that does not exist stands for the group's first.

    The tokens are the same in every row: so each warp loads B and C for itself, and none waits for another.
    """
    EACH: tl.constexpr = DIM // NGROUPS
    TILES: tl.constexpr = (EACH + CHANNELS - 1) // CHANNELS
    g, b = tl.program_id(0) // TILES % NGROUPS, tl.program_id(0) // (TILES * NGROUPS)
    in_group = tl.program_id(0) % TILES * CHANNELS + tl.arange(0, CHANNELS)[:, None]
    in_d = in_group < EACH
    d = g * EACH + tl.where(in_d, in_group, 0)
    return b.to(tl.int64), g, d.to(tl.int64), in_d, tl.arange(0, CHUNK)[None, :] + tl.zeros([CHANNELS, 1], tl.int32)


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
def load_tokens(t, stride, first, offs_t, seqlen):
    """Tokens first + offs_t of a row that t points at: [T] fp32, or [D, T] for a column of rows; 0 after the last."""
    tokens = tl.cast(first, tl.int64) + offs_t
    return tl.load(t + tokens * stride, mask=tokens < seqlen, other=0.0).to(tl.float32)


@triton.jit
def load_step(delta, stride, bias, first, offs_t, seqlen, SOFTPLUS: tl.constexpr):
    """(S1): delta with its bias, and the step; both 0 after the last token, which then changes no state."""
    raw = load_tokens(delta, stride, first, offs_t, seqlen) + bias
    step = softplus(raw) if SOFTPLUS else raw
    return raw, tl.where(first + offs_t < seqlen, step, 0.0)


@triton.jit
def gate_and_slope(z):
    """silu(z), and its derivative."""
    s = sigmoid(z)
    return z * s, s * (1.0 + z * (1.0 - s))
