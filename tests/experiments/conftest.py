"""What the tests of training share."""

import io

import pytest
from rich.console import Console

from experiments import record
from experiments.workloads import Preset, get_workload
from ssd.block import arguments
from tests.experiments.small import graph_sizes, sizes, vision_sizes


@pytest.fixture(autouse=True)
def _no_row_of_a_test(monkeypatch):
    """What documents are written from gets no row of a tiny run, which is where rows of a GPU go unless told otherwise."""
    original = record.append

    def append(row, out=record.RESULTS):
        assert out != record.RESULTS, "a test adds rows to those that are committed"
        return original(row, out)

    monkeypatch.setattr(record, "append", append)


@pytest.fixture
def console():
    """Keeps what is printed, for `export_text`."""
    return Console(width=200, record=True, file=io.StringIO())


@pytest.fixture
def in_torch(monkeypatch):
    """What surrounds the operator is torch's on a CPU: interpreted, it takes minutes."""
    monkeypatch.setattr(arguments, "INTERPRETED", False)


@pytest.fixture
def small(monkeypatch, in_torch, one_thread):
    """A preset `small` of every workload, in torch alone on a CPU."""
    for name, pattern in (("mamba2", "MM"), ("hybrid", "M-*M")):
        presets = get_workload(name).presets
        monkeypatch.setitem(presets, "small", Preset(sizes(pattern), batch=4, seqlen=64, lr=1e-2))
        # with enough states to remove half of them
        monkeypatch.setitem(presets, "states", Preset(sizes(pattern, d_state=32), batch=2, seqlen=32, lr=1e-2))
    monkeypatch.setitem(get_workload("mambavision").presets, "small", Preset(vision_sizes(), batch=16, lr=5e-3))
    small_graphs = Preset(graph_sizes(), batch=4, lr=1e-2, weight_decay=0.01)
    monkeypatch.setitem(get_workload("graphmamba").presets, "small", small_graphs)
