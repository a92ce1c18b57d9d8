"""The backward of large inputs in two halves, one after the other, so that the states of one half are in memory at a time.

Without that, states that the backward computes again would take more memory than all else. A half is half of the batch. A
single sequence is cut in the middle instead. First the state there is computed: one walk more through the first half. Then the
second half runs, as a sequence that starts from that state, and gives its gradient. With this as dfinal_states the first half
runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from ssd.kernels.arguments import contiguous, output
from ssd.runtime.replay import replay
from ssd.types import INPUT_TENSORS, SUB_CHUNK, Options, SSDGrads, SSDInputs, SSDSaved

_MOST_BYTES = 1 << 28  # of states in the dtype of x: above this, saving memory matters more than saving launches
_OF_TOKENS = ("x", "dt", "B", "C", "z", "seq_idx")
_SUMMED = ("dA", "dD", "ddt_bias")
_OTHERS = (*_SUMMED, "dinitial_states")
_PLACES = ("dx", "ddt", "dB", "dC", "dz", "dinitial_states")
_ALL = slice(None)

Backward = Callable[[SSDSaved, Tensor, Tensor | None, SSDGrads], SSDGrads]
LastState = Callable[[SSDInputs, Options], Tensor]


def should_split(saved: SSDSaved, every: int) -> bool:
    """Whether the states that a backward computes again, every so many tokens, are large, and can be had in halves."""
    i = saved.inputs
    if saved.prev_states is not None or (i.batch == 1 and i.seqlen < 2 * SUB_CHUNK):
        return False
    return i.batch * -(-i.seqlen // every) * i.nheads * i.headdim * i.dstate * i.x.element_size() >= _MOST_BYTES


def run_in_halves(backward: Backward, last_state: LastState, saved: SSDSaved, dout: Tensor, dfinal_states: Tensor | None,
                  into: SSDGrads) -> SSDGrads:
    """As backward(saved, dout, dfinal_states, into).

    last_state: of inputs and options, the state after their last token, (batch, nheads, headdim, dstate) fp32.
    """
    i, options = saved.inputs, saved.options
    places = {"dx": i.x, "ddt": i.dt, "dB": i.B, "dC": i.C, "dz": i.z}
    whole = {name: t if t is None else output(t, getattr(into, name)) for name, t in places.items()}

    def run_half(rows: slice, tokens: slice, start: Tensor | None, dinto: Tensor | None, dfinal: Tensor | None) -> SSDGrads:
        part = replace(_take_part(i, rows, tokens), initial_states=start)
        places = SSDGrads(**{name: t if t is None else t[rows, tokens] for name, t in whole.items()}, dinitial_states=dinto)
        y, out = (contiguous(None if t is None else t[rows, tokens]) for t in (saved.y, saved.out))
        return _run_half(backward, options, part, y, out, dout[rows, tokens], dfinal, places)

    if i.batch == 1:
        middle = -(-i.seqlen // (2 * SUB_CHUNK)) * SUB_CHUNK
        front = _take_part(i, _ALL, slice(middle))
        (state,) = _launch(options, _run_last_state, front.tensors, (*front.settings, last_state, options))
        second = run_half(_ALL, slice(middle, None), state, None, dfinal_states)
        first = run_half(_ALL, slice(middle), i.initial_states, into.dinitial_states, second.dinitial_states)
        dinitial_states = first.dinitial_states
    else:
        starts = i.initial_states
        dinitial_states = None if starts is None else output(starts, into.dinitial_states, torch.float32)
        given = starts, dinitial_states, dfinal_states
        first, second = (run_half(rows, _ALL, *(None if t is None else t[rows] for t in given))
                         for rows in (slice(i.batch // 2), slice(i.batch // 2, None)))
    sums = {name: None if getattr(first, name) is None else getattr(first, name) + getattr(second, name) for name in _SUMMED}
    return SSDGrads(**whole, **sums, dinitial_states=dinitial_states)


def _run_half(backward: Backward, options: Options, i: SSDInputs, y: Tensor | None, out: Tensor | None, dout: Tensor,
              dfinal_states: Tensor | None, into: SSDGrads) -> SSDGrads:
    """The gradients of one half, recorded by itself: recorded together, the second could not take the first's memory.

    into: all but the sums, and dinitial_states perhaps.
    """
    places = [getattr(into, name) for name in _PLACES]
    others = _launch(options, _run_others, (*i.tensors, y, out, dout, dfinal_states, *places), (*i.settings, backward, options))
    return replace(into, **{name: t for name, t in zip(_OTHERS, others, strict=True) if t is not None})


def _launch(options: Options, call: Callable, tensors: tuple, settings: tuple) -> tuple:
    return replay(call, tensors, settings) if options.replay else call(*tensors, *settings)


def _run_others(*args) -> tuple[Tensor | None, ...]:
    """The gradients that were given no place."""
    args = iter(args)
    tensors, (y, out, dout, dfinal_states), places = (tuple(islice(args, n)) for n in (INPUT_TENSORS, 4, len(_PLACES)))
    *settings, backward, options = args
    into = SSDGrads(**dict(zip(_PLACES, places, strict=True)))
    grads = backward(SSDSaved(SSDInputs.of(tensors, settings), options, y, out=out), dout, dfinal_states, into)
    return tuple([getattr(grads, name) if getattr(into, name) is None else None for name in _OTHERS])


def _run_last_state(*args) -> tuple[Tensor]:
    tensors, (*settings, last_state, options) = args[:INPUT_TENSORS], args[INPUT_TENSORS:]
    return (last_state(SSDInputs.of(tensors, settings), options),)


def _take_part(i: SSDInputs, rows: slice, tokens: slice) -> SSDInputs:
    """Those rows' tokens; initial_states are still of all rows. They reach document 0, which in a part that begins later is the
    document of the token before.
    """
    cut = {name: None if getattr(i, name) is None else getattr(i, name)[rows, tokens] for name in _OF_TOKENS}
    if i.seq_idx is not None and tokens.start:
        cut["seq_idx"] = cut["seq_idx"] - i.seq_idx[rows, tokens.start - 1 : tokens.start]
    return replace(i, **cut, cu_seqlens=None)
