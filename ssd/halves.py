"""The backward of long inputs in two halves, where their states, computed again, would take more memory than all else.

They are of the batch. A single sequence is cut in the middle: its second half is a sequence of its own from the state there,
and leaves that state's gradient, and from this the first half is one, for one walk more through it. Either way the states of
one half are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .kernels.arguments import contiguous, output
from .types import SUB_CHUNK, SSDGrads, SSDInputs, SSDSaved

_LARGE = 1 << 28  # bytes of states: beyond, memory runs out sooner than a launch counts
_OF_TOKENS = ("x", "dt", "B", "C", "z", "seq_idx")
_SUMMED = ("dA", "dD", "ddt_bias")
_ALL = slice(None)

Backward = Callable[[SSDSaved, Tensor, Tensor | None, SSDGrads], SSDGrads]


def worth_halving(saved: SSDSaved) -> bool:
    """Whether the states that a backward computes again are large, and can be had in halves."""
    i = saved.inputs
    if saved.prev_states is not None or (i.batch == 1 and i.seqlen < 2 * SUB_CHUNK):
        return False
    return i.batch * -(-i.seqlen // SUB_CHUNK) * i.nheads * i.headdim * i.dstate * i.x.element_size() >= _LARGE


def by_halves(backward: Backward, last_state: Callable[[SSDInputs], Tensor], saved: SSDSaved, dout: Tensor,
              dfinal_states: Tensor | None, into: SSDGrads) -> SSDGrads:
    """As backward(saved, dout, dfinal_states, into).

    last_state: of inputs, the state after their last token, (batch, nheads, headdim, dstate) fp32.
    """
    i = saved.inputs
    given = {"dx": i.x, "ddt": i.dt, "dB": i.B, "dC": i.C} | ({} if i.z is None else {"dz": i.z})
    whole = {name: output(t, getattr(into, name)) for name, t in given.items()}

    def half(rows: slice, tokens: slice, start: Tensor | None, dinto: Tensor | None, dfinal: Tensor | None) -> SSDGrads:
        part = replace(_part(i, rows, tokens), initial_states=start)
        kept = replace(saved, inputs=part, y=contiguous(None if saved.y is None else saved.y[rows, tokens]))
        places = SSDGrads(**{name: t[rows, tokens] for name, t in whole.items()}, dinitial_states=dinto)
        return backward(kept, dout[rows, tokens], dfinal, places)

    if i.batch == 1:
        middle = -(-i.seqlen // (2 * SUB_CHUNK)) * SUB_CHUNK
        state = last_state(_part(i, _ALL, slice(middle)))
        second = half(_ALL, slice(middle, None), state, None, dfinal_states)
        first = half(_ALL, slice(middle), i.initial_states, into.dinitial_states, second.dinitial_states)
        dinitial_states = first.dinitial_states
    else:
        starts = i.initial_states
        dinitial_states = None if starts is None else output(starts, into.dinitial_states, torch.float32)
        first, second = (half(rows, _ALL, *(None if t is None else t[rows] for t in (starts, dinitial_states, dfinal_states)))
                         for rows in (slice(i.batch // 2), slice(i.batch // 2, None)))
    sums = {name: None if getattr(first, name) is None else getattr(first, name) + getattr(second, name) for name in _SUMMED}
    return SSDGrads(**whole, **sums, dinitial_states=dinitial_states)


def _part(i: SSDInputs, rows: slice, tokens: slice) -> SSDInputs:
    """Those rows' tokens; initial_states are still of all rows. They reach document 0, which in a part that begins later is the
    document of the token before.
    """
    cut = {name: None if getattr(i, name) is None else getattr(i, name)[rows, tokens] for name in _OF_TOKENS}
    if i.seq_idx is not None and tokens.start:
        cut["seq_idx"] = cut["seq_idx"] - i.seq_idx[rows, tokens.start - 1 : tokens.start]
    return replace(i, **cut, cu_seqlens=None)
