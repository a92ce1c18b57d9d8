"""States that are late: what scans from them begins after they have come."""

from dataclasses import replace

import pytest
import torch

from fused import hopper
from fused.kernels.hopper.early import may_begin_early
from ssd.runtime.late import deliver_late, receive
from ssd.types import Options
from tests.executor import Executor
from tests.fused.hopper_on_cpu import KERNELS, hopper_on_cpu
from tests.fused.test_executor import PIECES, WAYS, draw

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves run here")


@pytest.fixture(scope="module")
def executor() -> Executor:
    return Executor(*KERNELS)


def test_may_begin_early():
    """Not while a given state is late, nor behind anything but chunk_cumsum and the state pass."""
    ends, late, other = torch.empty(3, 4)
    with deliver_late(late, lambda: None):
        for before in ((ends, False), (None, True)):
            assert may_begin_early(*before, other, None) and not may_begin_early(*before, late, None)
        receive()
        assert may_begin_early(ends, False, late, None)
    assert not may_begin_early(None, False, other)


def test_what_waits_for_a_state_is_not_cut_end_to_end(executor, monkeypatch):
    inputs, variant = draw(WAYS["cut, states given"])
    steps = []
    monkeypatch.setattr(hopper, "make_runs", lambda *given, **_: steps.append(given[7]) or pytest.fail("as far as it goes"))
    for late in (None, inputs.initial_states):
        with (hopper_on_cpu(executor), pytest.raises(pytest.fail.Exception), deliver_late(late, lambda: None)):
            variant.forward(inputs, Options(), False)
    assert steps == ["scan_step", "kept_scan_step"]


@pytest.mark.parametrize("name", ("cut, states given", "cut for spans", "dstate 256, headdim 128, D by channel"))
def test_a_state_that_is_late(name, executor):
    """It comes between the state pass and what scans, which then may not begin early: the executor would find fault with it."""
    way = WAYS[name]
    inputs, variant = draw(way)
    late = torch.full_like(inputs.initial_states, torch.nan)

    def forward(i):
        with hopper_on_cpu(executor, way.blocks, way.cut):
            return variant.forward(i, Options(), False)[:2]

    def bring():
        late.copy_(inputs.initial_states)
        launched.extend(executor.launched)

    expected, launched = forward(inputs), []
    executor.launched.clear()
    with deliver_late(late, bring):
        got = forward(replace(inputs, initial_states=late))
    assert launched == [PIECES] and len(executor.launched) > 1 and all(map(torch.equal, got, expected))
