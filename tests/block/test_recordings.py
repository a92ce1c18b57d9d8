"""The block's functions repeat their launches: their calls can be recorded."""

from dataclasses import replace

import pytest
import torch

from ssd.runtime import replay
from tests.block.test_conv1d import CONTINUED
from tests.functions import BLOCK, MORE_CALLS, Function, convolution
from tests.runtime.without_gpu import record_without_gpu


def tokens_apart(function: Function) -> Function:
    """As between projections, whose tokens lie apart."""
    return function._replace(inputs=lambda *of: {
        name: t.mT.contiguous().mT if name in ("u", "delta", "B", "C", "z") and t is not None else t
        for name, t in function.inputs(*of).items()})


FUNCTIONS = {  # and how many recordings: a scan's forward keeps states only for a backward
    "conv1d": (BLOCK["conv1d"], 2),
    "conv1d without bias": (convolution(replace(CONTINUED, bias=False)), 2),
    "conv1d of documents": (MORE_CALLS["conv1d of documents"], 2),
    "middle": (BLOCK["middle"], 3),
    "gated_norm": (BLOCK["gated_norm"], 2),
    "gated_norm without bias": (MORE_CALLS["norm, gate before, bias False"], 2),
    "selective_scan": (tokens_apart(BLOCK["selective_scan"]), 3),
    "selective_scan without options": (tokens_apart(MORE_CALLS["selective_scan without options"]), 3),
}


@pytest.mark.parametrize(("function", "recordings"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_recorded(function, recordings, monkeypatch):
    """A forward and a backward, each one recording."""
    monkeypatch.setattr("ssd.block.selective_scan.takes_walk", lambda u, B: True)
    record_without_gpu(monkeypatch)
    given = function.inputs(40, "cpu", torch.float32)
    for _ in range(3):
        outs = function.call(**given)
        function.results(given, ways=tuple(map(torch.randn_like, outs if isinstance(outs, tuple) else (outs,))))
    assert [type(t) for t in replay._recordings.values()] == [replay.Recording] * recordings
