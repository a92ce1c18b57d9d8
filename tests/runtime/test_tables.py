"""Tables of runs: few enough are kept, and none is freed that a graph or another stream may read."""

import gc
import random
import threading
import weakref
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fused.schedule import Runs, deal, deal_two_level
from ssd.runtime import tables
from ssd.runtime.tables import get_tables

CPU = torch.device("cpu")
BYTES = 4 * 6  # of a run
SCAN = "h200", "scan_step"


class Maker:
    """Makes a table of so many runs, and remembers what it made."""

    def __init__(self):
        self.made: list[int] = []
        self.alive: dict[int, weakref.ref] = {}

    def __call__(self, nruns: int, device: torch.device) -> Runs:
        self.made.append(nruns)
        runs = Runs(torch.full((nruns, 1, 6), nruns, dtype=torch.int32), None, 0)
        self.alive[nruns] = weakref.ref(runs.sequences)
        return runs

    def still(self) -> set[int]:
        gc.collect()
        return {nruns for nruns, table in self.alive.items() if table() is not None}


@pytest.fixture(autouse=True)
def make(monkeypatch) -> Maker:
    monkeypatch.setattr(tables, "_kept", {})
    monkeypatch.setattr(tables, "_held", {})
    return Maker()


@pytest.fixture
def capturing(monkeypatch):
    """Says that a CUDA graph is being captured from now on, or no longer."""
    def say(yes: bool) -> None:
        monkeypatch.setattr(tables, "_is_capturing", lambda device: yes)

    return say


def test_whole_on_return(make, monkeypatch):
    """What reads a table may begin before the launch that comes ahead of it in the stream has ended."""
    stream = Mock(synchronize=Mock(side_effect=lambda: make.made.append("whole")))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda of: nullcontext())
    tables._make(make, (3,), torch.device("cuda", 0))
    assert make.made == [3, "whole"]


def test_made_once(make):
    first = get_tables(make, (3,), CPU)
    assert get_tables(make, (3,), CPU) is first and make.made == [3]
    assert (get_tables(make, (4,), CPU).sequences == 4).all() and make.made == [3, 4]


def test_bytes_are_bounded(make, monkeypatch):
    """But one table, however large, is kept until another comes."""
    monkeypatch.setattr(tables, "_MOST_BYTES", 10 * BYTES)
    for nruns, still in ((4, {4}), (6, {4, 6}), (1, {1, 6}), (50, {50}), (2, {2}), (8, {2, 8})):
        get_tables(make, (nruns,), CPU)
        assert make.still() == still
        assert tables._kept[CPU].nbytes == sum(still) * BYTES


def test_random_use_stays_within_the_bounds(make, monkeypatch):
    monkeypatch.setattr(tables, "_MOST_ENTRIES", 5)
    monkeypatch.setattr(tables, "_MOST_BYTES", 40 * BYTES)
    draw = random.Random(0)
    for _ in range(500):
        nruns = draw.randint(1, 20)
        assert get_tables(make, (nruns,), CPU).sequences.shape == (nruns, 1, 6)
        kept = tables._kept[CPU]
        assert len(kept.entries) <= 5 and kept.nbytes <= 40 * BYTES
        assert kept.nbytes == sum(runs.sequences.nbytes for runs in kept.entries.values())


def test_each_stream_has_its_own(make, monkeypatch):
    """Or memory that is freed in one stream is given out again while a kernel of another reads it."""
    seen = []
    for stream in (1, 2, 1, 2):
        monkeypatch.setattr(tables, "_get_stream", lambda device, stream=stream: stream)
        seen.append(get_tables(make, (3,), CPU).sequences)
    assert seen[0] is seen[2] and seen[1] is seen[3] and seen[0] is not seen[1] and make.made == [3, 3]


def test_what_a_graph_reads_is_held_for_good(make, capturing, monkeypatch):
    """Though captured in another stream than the one that it was made in."""
    monkeypatch.setattr(tables, "_MOST_ENTRIES", 2)
    get_tables(make, (1,), CPU), get_tables(make, (2,), CPU)
    capturing(True)
    monkeypatch.setattr(tables, "_get_stream", lambda device: 5)
    assert (get_tables(make, (1,), CPU).sequences == 1).all() and make.made == [1, 2]
    capturing(False)
    for nruns in range(3, 10):
        get_tables(make, (nruns,), CPU)
    assert make.still() == {1, 8, 9}


def test_first_call_inside_a_capture_is_refused(make, capturing):
    capturing(True)
    with pytest.raises(RuntimeError, match="inside a CUDA-graph capture; call once before"):
        get_tables(make, (3,), CPU)
    capturing(False)
    assert get_tables(make, (3,), CPU).sequences.shape == (3, 1, 6) and make.made == [3]


def test_threads_share_them(make):
    """Each is made once, whichever thread comes first."""
    start, got = threading.Barrier(8), []

    def work():
        start.wait()
        got.extend(get_tables(make, (nruns,), CPU) for nruns in range(1, 20))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8 * 19 and sorted(make.made) == list(range(1, 20))
    assert tables._kept[CPU].nbytes == sum(range(1, 20)) * BYTES


def test_an_error_leaves_nothing_behind(make):
    with pytest.raises(TypeError):
        get_tables(make, (None,), CPU)
    assert get_tables(make, (3,), CPU).sequences.shape == (3, 1, 6)
    assert list(tables._kept[CPU].entries) == [(make, (3,), 0)]


def test_making_them_is_not_seen():
    """By what records the launches of a call, which would give up."""
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    with Watch():
        get_tables(deal, (3, 96, 32, 132, *SCAN, True, 1), CPU)


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch):
    """The same tables in any stream, read at once; and memory that is bounded."""
    monkeypatch.setattr(tables, "_MOST_ENTRIES", 4)
    device = torch.device("cuda", torch.cuda.current_device())
    before = torch.cuda.memory_allocated()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for nsub in range(100, 120):
                for make, settings in ((deal, (3, 96, nsub, 132, *SCAN, True, 1)), (deal_two_level, (3, 96, nsub, 2, None))):
                    got, wanted = get_tables(make, settings, device), make(*settings, CPU)
                    assert torch.equal(got.sequences.clone().cpu(), wanted.sequences)
                    assert wanted.pieces is None or torch.equal(got.pieces.clone().cpu(), wanted.pieces)
    del got
    assert torch.cuda.memory_allocated() - before <= 4 * 3 * 96 * 60 * BYTES + 4096  # with what torch rounds up


@pytest.mark.gpu
def test_a_captured_graph_outlives_its_tables(monkeypatch):
    monkeypatch.setattr(tables, "_MOST_ENTRIES", 1)
    device = torch.device("cuda", torch.cuda.current_device())
    settings = 2, 40, 10, 4, None
    wanted = get_tables(deal_two_level, settings, device).sequences.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy = get_tables(deal_two_level, settings, device).sequences * 1
    for nsub in range(11, 40):
        get_tables(deal_two_level, (2, 40, nsub, 4, None), device)
        torch.full_like(wanted, -1)  # in memory that was freed
    graph.replay()
    assert torch.equal(copy, wanted)
