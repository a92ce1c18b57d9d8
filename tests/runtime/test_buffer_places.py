"""Scratch memory of recorded calls: buffers that live at the same time lie apart, the others share."""

import random

import pytest
import torch

from ssd import autograd
from ssd.registry import get_variant
from ssd.runtime import buffer_places, replay
from ssd.runtime.buffer_places import SCRATCH, Buffer, Place, check_apart, place_buffers
from ssd.types import Options, SSDInputs
from tests.runtime.without_gpu import record_without_gpu

MIB = 1 << 20


def test_buffers_apart_in_time_share():
    places, nbytes = place_buffers([Buffer(4 * MIB, 0, 1), Buffer(3 * MIB, 2, 3), Buffer(MIB, 1, 2)], [])
    assert places[0].offset == places[1].offset == 0 and places[2].offset == 4 * MIB and nbytes == 5 * MIB


def test_a_result_lends_its_memory_until_it_is_used():
    result = Buffer(4 * MIB, 2, 5)
    assert place_buffers([Buffer(4 * MIB, 0, 1)], [result]) == ([Place(0, 0)], 0)
    assert place_buffers([Buffer(4 * MIB, 0, 2)], [result]) == ([Place(SCRATCH, 0)], 4 * MIB)
    assert place_buffers([Buffer(5 * MIB, 0, 1)], [result]) == ([Place(SCRATCH, 0)], 5 * MIB)


def test_random_lifetimes():
    draw = random.Random(0)
    for _ in range(300):
        def buffer() -> Buffer:
            return Buffer(draw.randint(1, 5000), *sorted((draw.randint(0, 9), draw.randint(0, 9))))

        buffers, results = ([buffer() for _ in range(draw.randint(0, most))] for most in (12, 3))
        places, nbytes = place_buffers(buffers, results)
        check_apart(buffers, places, results)
        most = max((sum(b.nbytes for b in buffers if b.first <= now <= b.last) for now in range(10)), default=0)
        lent = sum(b.nbytes for b, place in zip(buffers, places, strict=True) if place.room != SCRATCH)
        assert most - lent <= nbytes <= sum(buffer_places._round_up(b.nbytes) for b in buffers)
        for b, place in zip(buffers, places, strict=True):
            assert place.offset % buffer_places.ALIGNMENT == 0
            assert place.room == SCRATCH or place.offset + b.nbytes <= results[place.room].nbytes


@pytest.mark.parametrize("buffers, places, results", [
    ([Buffer(1000, 0, 2), Buffer(10, 2, 3)], [Place(SCRATCH, 0), Place(SCRATCH, 512)], []),
    ([Buffer(10, 1, 1), Buffer(1000, 0, 2)], [Place(SCRATCH, 512), Place(SCRATCH, 0)], []),
    ([Buffer(10, 0, 2)], [Place(0, 0)], [Buffer(100, 2, 9)]),
], ids=("the second inside the first", "the first inside the second", "in a result that is used"))
def test_a_planted_overlap_is_refused(buffers, places, results):
    with pytest.raises(RuntimeError, match=r"launch [12]"):
        check_apart(buffers, places, results)


@pytest.fixture
def on_gpu_without_one(monkeypatch):
    record_without_gpu(monkeypatch)
    monkeypatch.setattr("ssd.runtime.tuning._index", lambda inputs: None)


def layer(batch: int, seqlen: int, nheads: int, chunk_size: int) -> SSDInputs:
    """Inputs of headdim 64 and dstate 128 in 8 groups, which nobody may read."""
    x, dt = torch.empty(batch, seqlen, nheads, 64, dtype=torch.float16), torch.empty(batch, seqlen, nheads, dtype=torch.float16)
    B, C = (torch.empty(batch, seqlen, 8, 128, dtype=torch.float16) for _ in range(2))
    return SSDInputs(x, dt, torch.empty(nheads), B, C, chunk_size)


def record(inputs: SSDInputs, **options) -> replay.Recording | None:
    """The recording of the baseline's forward, whose third call is replayed."""
    settings = *inputs.settings, "baseline", autograd.encode(Options(**options)), False
    for _ in range(3):
        autograd._CHUNK_SCAN(inputs.tensors, settings, save=False)
    found = [one for one in replay._recordings.values() if isinstance(one, replay.Recording)]
    return found[0] if found else None


def test_a_forward_holds_no_more_than_its_launches_need(on_gpu_without_one):
    """8b-b4: out and final_states, and beside them prev_states, CB, dt and dA_cumsum; the fp32 states lie in out."""
    recording = record(layer(4, 4096, 128, 256))
    assert recording.held_bytes == (256 + 16 + 128 + 128 + 8 + 8) * MIB


def test_places_that_overlap_are_refused(on_gpu_without_one, monkeypatch):
    monkeypatch.setattr(replay, "place_buffers", lambda buffers, results: ([Place(SCRATCH, 0) for _ in buffers], MIB))
    with pytest.raises(RuntimeError, match="share memory, and both live at launch"):
        record(layer(1, 64, 8, 64))


def test_replay_off_records_nothing(on_gpu_without_one, monkeypatch):
    assert record(layer(1, 64, 8, 64), replay=False) is None and not replay._recordings
    monkeypatch.setattr(replay, "_ENABLED", False)  # as SSD_REPLAY=0 does
    assert record(layer(1, 64, 8, 64)) is None and not replay._recordings
    monkeypatch.undo()
    assert "replay" in get_variant("baseline").options
