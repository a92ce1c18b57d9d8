"""The persistent forward of sequences in one segment and in several."""

from dataclasses import replace

import pytest
import torch

from fused.schedule import cut_evenly
from ssd.registry import get_variant
from ssd.runtime import tuning
from ssd.types import Options
from tests.errors import assert_forward_right
from tests.fused.test_options import CASES, SHAPE
from tests.inputs import HALF, Case, Shape, random_inputs

pytestmark = pytest.mark.usefixtures("poison")
PERSISTENT = get_variant("persistent")


def cut(inputs):
    """How the forward cuts these inputs, whose headdim is one block."""
    config, device = tuning.pick("stationary_scan", inputs), tuning.device_of(inputs)
    return cut_evenly(inputs.seqlen, config["BLOCK_M"], inputs.batch * inputs.nheads, 2 * device.sms, device.name)


def cut_into_documents(inputs, length: int):
    """The same inputs, a new document every `length` tokens; the first is reached by initial_states."""
    tokens = torch.arange(inputs.seqlen, device=inputs.x.device, dtype=torch.int32)
    ends = torch.cat([tokens[::length], tokens[-1:] + 1])
    return replace(inputs, seq_idx=(tokens // length)[None].contiguous(), cu_seqlens=ends)


@pytest.mark.parametrize("documents", (None, "piece", "segment"))
def test_segments_are_right_and_the_same_bits_again(documents, device):
    """A document that ends exactly where a segment or a piece does. Without segments: tests/fused/test_options.py."""
    inputs = random_inputs(Shape(1, 2600, 1, 16, 1, 16, 128), Case(initial_states=True, D="h", z=True), HALF, device)
    schedule = cut(inputs)
    assert schedule.nsegments > 1 < schedule.pieces and schedule.piece > tuning.pick("stationary_scan", inputs)["BLOCK_M"]
    if documents:
        inputs = cut_into_documents(inputs, getattr(schedule, documents))
    first = assert_forward_right(PERSISTENT, inputs, Options(gluon=False))
    out, final_states, _ = PERSISTENT.forward(inputs, Options(gluon=False), False)
    assert torch.equal(out, first["out"]) and torch.equal(final_states, first["final_states"])


def test_the_states_kept_are_those_of_chunks(device):
    """Whether the state was in registers or in memory."""
    inputs = random_inputs(SHAPE, CASES["everything"], torch.float32, device)
    stationary, by_chunk = (PERSISTENT.forward(inputs, Options(stationary=s, gluon=False), True)[2].prev_states
                            for s in (True, False))
    torch.testing.assert_close(stationary, by_chunk, rtol=1e-4, atol=1e-4)
