"""The backward of long sequences in two halves, where their states, computed again, would take more memory than all else.

The second half is a sequence of its own from the state in the middle, and leaves that state's gradient; from it the first half
is one. So the states of one half are in memory at a time, for one walk more through the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from .kernels.arguments import contiguous, output
from .types import SUB_CHUNK, SSDGrads, SSDInputs, SSDSaved

_LARGE = 1 << 28  # bytes of states: beyond, memory runs out sooner than a launch counts

Backward = Callable[[SSDSaved, Tensor, Tensor | None, SSDGrads], SSDGrads]


def worth_halving(saved: SSDSaved) -> bool:
    """Whether the states that a backward computes again are large; and no documents begin in a row, whose number says what
    initial_states reach.
    """
    i = saved.inputs
    if saved.prev_states is not None or i.seq_idx is not None or i.seqlen < 2 * SUB_CHUNK:
        return False
    return i.batch * -(-i.seqlen // SUB_CHUNK) * i.nheads * i.headdim * i.dstate * i.x.element_size() >= _LARGE


def by_halves(backward: Backward, last_state: Callable[[SSDInputs], Tensor], saved: SSDSaved, dout: Tensor,
              dfinal_states: Tensor | None, into: SSDGrads) -> SSDGrads:
    """As backward(saved, dout, dfinal_states, into).

    last_state: of inputs, the state after their last token, (batch, nheads, headdim, dstate) fp32.
    """
    i = saved.inputs
    middle = -(-i.seqlen // (2 * SUB_CHUNK)) * SUB_CHUNK
    given = {"dx": i.x, "ddt": i.dt, "dB": i.B, "dC": i.C} | ({} if i.z is None else {"dz": i.z})
    whole = {name: output(t, getattr(into, name)) for name, t in given.items()}

    def half(tokens: slice, initial_states: Tensor | None, dinto: Tensor | None, dfinal: Tensor | None) -> SSDGrads:
        part = replace(_tokens(i, tokens), initial_states=initial_states)
        kept = replace(saved, inputs=part, y=contiguous(None if saved.y is None else saved.y[:, tokens]))
        places = SSDGrads(**{name: t[:, tokens] for name, t in whole.items()}, dinitial_states=dinto)
        return backward(kept, dout[:, tokens], dfinal, places)

    state = last_state(_tokens(i, slice(middle)))
    second = half(slice(middle, None), state, None, dfinal_states)
    first = half(slice(middle), i.initial_states, into.dinitial_states, second.dinitial_states)
    sums = {name: None if getattr(first, name) is None else getattr(first, name) + getattr(second, name)
            for name in ("dA", "dD", "ddt_bias")}
    return SSDGrads(**whole, **sums, dinitial_states=first.dinitial_states)


def _tokens(i: SSDInputs, tokens: slice) -> SSDInputs:
    of_tokens = {name: getattr(i, name) for name in ("x", "dt", "B", "C", "z")}
    return replace(i, **{name: t if t is None else t[:, tokens] for name, t in of_tokens.items()})
