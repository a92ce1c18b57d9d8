"""Faults such as kernels have, planted in the variant `torch`."""

import os
import signal
import time
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from experiments.fuzz import worker
from ssd import torch_variant

_VARIANT = torch_variant.VARIANT
_FIRST = {}  # results that a stale replay returns


def _edit(outputs=None, grads=None):
    """The variant with its outputs (out, final_states) or its gradients changed."""

    def forward(inputs, options, save):
        out, final_states, saved = _VARIANT.forward(inputs, options, save)
        return (out, final_states, saved) if outputs is None else (*outputs(out, final_states), saved)

    def backward(*args):
        result = _VARIANT.backward(*args)
        return result if grads is None else replace(result, **grads(result))

    return replace(_VARIANT, forward=forward, backward=backward)


def _all(change):
    """The change made to every gradient there is."""
    return lambda g: {name: change(t) for name, t in vars(g).items() if t is not None}


def _at(t, index, change):
    t = t.clone()
    t[index] = change(t[index])
    return t


def _swap(t, axis):
    return t.index_select(axis, torch.tensor([1, 0, *range(2, t.shape[axis])]))


def _stale(inputs, options, save):
    result = _VARIANT.forward(inputs, options, save)
    return _FIRST.setdefault(inputs.x.shape, result)


def _unwritten(out):
    fresh = torch.empty(out.shape, dtype=out.dtype)
    fresh[:, :-1] = out[:, :-1]
    return fresh


def _ends(*args):
    os.kill(os.getpid(), signal.SIGSEGV)


def _hangs(*args):
    time.sleep(1000)


LATE = (0, -1)  # a row and its last token
FAULTS = {
    "out scaled": _edit(lambda out, f: (out * 1.02, f)),
    "final_states scaled": _edit(lambda out, f: (out, f * 1.02)),
    **{f"{name} scaled": _edit(grads=lambda g, name=name: {name: getattr(g, name) * 1.02})
       for name in ("dx", "ddt", "dA", "dB", "dC", "dD", "dz", "ddt_bias", "dinitial_states")},
    "one head's dx scaled": _edit(grads=lambda g: {"dx": _at(g.dx, (slice(None), slice(None), 2), lambda t: t * 1.1)}),
    "one group's dB scaled": _edit(grads=lambda g: {"dB": _at(g.dB, (slice(None), slice(None), 1), lambda t: t * 1.1)}),
    "heads of out swapped": _edit(lambda out, f: (_swap(out, 2), f)),
    "heads of final_states swapped": _edit(lambda out, f: (out, _swap(f, 1))),
    "heads of dA swapped": _edit(grads=lambda g: {"dA": _swap(g.dA, 0)}),
    "last token of out skipped": _edit(lambda out, f: (_at(out, LATE, torch.zeros_like), f)),
    "last token of dx skipped": _edit(grads=lambda g: {"dx": _at(g.dx, LATE, torch.zeros_like)}),
    "last token of one head of dz skipped": _edit(grads=lambda g: {"dz": _at(g.dz, (*LATE, 3), torch.zeros_like)}),
    "stale": replace(_VARIANT, forward=_stale),
    "last row unwritten": _edit(lambda out, f: (_unwritten(out), f)),
    "gradients to no end": _edit(grads=_all(lambda t: t * float("inf"))),
    "raises": _edit(lambda out, f: out.no_such_thing),
    "ends its process": replace(_VARIANT, forward=_ends),
    "hangs": replace(_VARIANT, forward=_hangs)}


def run_worker(name: str, pipe: Connection, said: str) -> None:
    """As `worker.main`, with the fault."""
    torch_variant.VARIANT = FAULTS[name]
    worker.main(pipe, said)
