"""A state that is passed on before its values are there."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ssd import Options, ssd_chunk_scan
from ssd.runtime import launch
from ssd.runtime.late import deliver_late
from tests.inputs import HALF, OURS, Case, Shape, arguments, random_inputs

ON_GPU = torch.cuda.is_available()
SHAPE = Shape(seqlen=2048, nheads=4, headdim=64, dstate=128, chunk_size=128) if ON_GPU else Shape(nheads=2, headdim=8, dstate=8)


@pytest.mark.parametrize("options", (Options(), Options(replay=False), Options(gluon=False)), ids=("", "eager", "plain"))
@pytest.mark.parametrize("trains", (False, True), ids=("infers", "trains"))
@pytest.mark.parametrize("variant", OURS)
def test_results_are_those_of_a_state_in_time(variant, trains, options, device):
    """Not read before it is there, in a call, its recording and what repeats it; some launches come before it."""
    i = random_inputs(SHAPE, Case(initial_states=True, z=True), HALF, device=device)
    i = replace(i, x=i.x.requires_grad_(trains))
    given = arguments(i) | {"variant": variant, "options": options, "return_final_states": True}
    expected = ssd_chunk_scan(**given)
    late, launched = torch.empty_like(i.initial_states), []

    def bring() -> None:
        late.copy_(i.initial_states)
        launched.append(len(launch._recorded.launches or ()))

    def call() -> tuple[Tensor, ...]:
        with deliver_late(late, bring):
            return ssd_chunk_scan(**given | {"initial_states": late})

    for _ in range(3):  # recorded, and begun early; calls that wait must not repeat that
        assert all(map(torch.equal, ssd_chunk_scan(**given), expected))
    for _ in range(4):
        late.fill_(float("nan"))
        assert all(map(torch.equal, call(), expected))
    launch.record_launches(call)
    assert len(launched) == 5
    assert launched[-1] > 0 or (ON_GPU and options.replay)  # what a recording repeats is not recorded again


def test_it_is_brought_where_nothing_is_launched_or_where_nobody_reads_it(device):
    brought = []
    with deliver_late(torch.empty(4, device=device), lambda: brought.append("unread")):
        ssd_chunk_scan(**arguments(random_inputs(SHAPE, device=device)), variant="baseline")
        assert not brought
    with deliver_late(None, lambda: brought.append("none")):
        pass
    assert brought == ["unread", "none"]


def test_an_error_leaves_nothing_to_bring(device):
    late = torch.empty(4, device=device)
    with pytest.raises(ZeroDivisionError), deliver_late(late, lambda: pytest.fail("it was brought")):
        raise ZeroDivisionError
    ssd_chunk_scan(**arguments(random_inputs(SHAPE, device=device)), variant="baseline")
