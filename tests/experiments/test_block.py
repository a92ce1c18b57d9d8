"""The bench of what surrounds the operator, without a GPU: a clock that is made up, sides that are torch."""


from unittest.mock import Mock

import pytest
import torch

from experiments import block, record, table
from experiments.shapes import Shape
from tests.experiments.clock import install

TINY, SCAN = Shape("tiny", 1, 8, 2, 8, 4, 1), Shape("scan", 1, 8, 2, 1, 2, 1)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Ours takes 10 us, upstream 25; a graph 5 less."""
    install(monkeypatch, lambda name, in_graph: (10 if name == "ssd" else 25) - 5 * in_graph)
    monkeypatch.setattr(block, "SCANS", (SCAN,))


@pytest.fixture
def run(tmp_path, console):
    """The rows of parts, and what was printed."""
    return lambda parts, modes=block.MODES: (
        block.run(parts, (TINY,), (SCAN,), modes, "fp32", tmp_path, console), console.export_text())


@pytest.fixture
def upstream(monkeypatch):
    """For every part: ours, off by a thousandth."""
    def off(part):
        def make(shape, dtype):
            work = part(shape, dtype)
            return block.Work(work.ours, ("rival", lambda: lambda: 1.001 * work.ours()), work.leaves, work.nbytes)

        return make

    monkeypatch.setattr(block, "PARTS", {name: off(part) for name, part in block.PARTS.items() if name != "state_update"})


def test_every_part_runs(run, tmp_path):
    """Those upstream has and this machine has not are named."""
    rows, said = run(tuple(block.PARTS))
    assert [(r["part"], r["mode"]) for r in rows if r["variant"] == "ssd"] == [
        (part, mode) for part in block.PARTS for mode in (("fwd",) if part == "state_update" else block.MODES)]
    assert {r["shape"] for r in rows if r["part"] == "selective_scan"} == {"scan"}
    assert record.read(tmp_path, bench="block") == rows == block.read_latest(tmp_path)
    assert "conv1d tiny: causal_conv1d is left out" in said or "causal_conv1d" in {r["variant"] for r in rows}


def test_comparison(run, upstream):
    rows, _ = run(tuple(block.PARTS))
    assert len(rows) == 2 * 3 * len(block.PARTS)
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        assert (ours["variant"], theirs["variant"], theirs["apart"]) == ("ssd", "rival", None)
        assert ours["speedup"] == 2.5 and ours["graph_speedup"] == 4.0 and "speedup" not in theirs
        assert ours["apart"] == pytest.approx(1e-3, rel=0.1)
    text = table.render(rows, "markdown", table.BLOCK)
    assert "| conv1d" in text and "4.00" in text


@pytest.mark.parametrize("part, forward, backward", [("conv1d", 2, 3), ("gated_norm", 3, 5), ("selective_scan", 4, 7)])
def test_bytes(part, forward, backward, run):
    rows, _ = run((part,))
    of_one = {"conv1d": 8 * 24, "gated_norm": 8 * 16, "selective_scan": 8 * 2}[part] * 4
    found = {r["mode"]: r for r in rows if r["variant"] == "ssd"}
    assert [found[mode]["ideal_bytes"] / of_one for mode in block.MODES] == [forward, backward, forward + backward]
    assert found["fwd"]["effective_gbps"] == found["fwd"]["ideal_bytes"] / 5 / 1e3  # in the graph
    assert found["fwd"]["sol"] == found["fwd"]["effective_gbps"] / 4000


def test_a_part_that_fails_costs_no_other(run, monkeypatch):
    monkeypatch.setitem(block.PARTS, "conv1d", Mock(side_effect=torch.OutOfMemoryError("no room")))
    rows, said = run(("conv1d", "gated_norm"), ("fwd",))
    assert {r["part"] for r in rows} == {"gated_norm"} and "conv1d tiny is left out: no room" in said
