"""The bench's own logic on a CPU: variants run for real, the clock is replaced."""

import json
from dataclasses import asdict
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console

from experiments import bench, record, timing
from experiments.inputs import make_inputs
from experiments.shapes import MODES, SMALL
from ssd import Options, cost
from ssd.registry import Variant
from tests.experiments.clock import install

SECONDS_OF = {("torch", 32): 2e-3, ("torch", 64): 1e-3, ("rival", 128): 4e-3, ("rival", 256): 3e-3}


@pytest.fixture
def clock(monkeypatch):
    """Times come from SECONDS_OF, a tenth less in a graph."""
    install(monkeypatch, lambda c, in_graph: 1e6 * SECONDS_OF[c.variant, c.chunk_size] * (0.9 if in_graph else 1))
    monkeypatch.setattr(bench, "make_inputs", lambda shape, dtype, device, **other: make_inputs(shape, dtype, "cpu", **other))
    monkeypatch.setitem(bench._PEER_CHUNK_SIZES, "rival", (128, 256))


@pytest.fixture
def rival(monkeypatch):
    """A peer, which is the torch variant under another name."""

    def scan(*, variant, **arguments):
        return bench_scan(variant="torch", **arguments)

    bench_scan = bench.ssd_chunk_scan
    monkeypatch.setattr(bench, "get_variant", lambda name: Variant(name, None, adapts="a coat" if name == "rival" else None))
    monkeypatch.setattr(bench, "is_peer", lambda name: name == "rival")
    monkeypatch.setattr(bench, "ssd_chunk_scan", scan)


@pytest.fixture
def run(tmp_path, console, clock):
    """The rows of a variant beside the rival, and what was printed."""
    return lambda *modes: (bench.run(("torch",), "rival", (SMALL,), modes or ("fwd",), "fp32", (32, 64), [Options()],
                                     tmp_path, console), console.export_text())


def test_rows(run, tmp_path, rival):
    rows, _ = run(*MODES)
    assert [(r["mode"], r["variant"], r["chunk_size"]) for r in rows[:4]] == [
        ("fwd", "torch", 32), ("fwd", "torch", 64), ("fwd", "rival", 128), ("fwd", "rival", 256)]
    assert [r.get("saved_mib") for r in rows[::4]] == [0.5 if mode in ("fwd_train", "fwd_bwd") else None for mode in MODES]
    assert len(rows) == 16 and all(r["err_rms"] < 1e-5 and r["err_seqlen"] == SMALL.seqlen for r in rows)
    assert [json.loads(line) for line in (tmp_path / "cpu" / "ssd.jsonl").read_text().splitlines()] == rows
    assert rows[2]["options"] is None and rows[0]["options"] == asdict(Options())
    assert rows[2]["note"] == "a coat" and rows[0]["note"] is None


def test_options_are_ours(tmp_path, clock, rival):
    """Each set of them is measured in the same run; a peer, which takes none, once."""
    both = Options(), Options(save_states=False)
    rows = bench.run(("torch",), "rival", (SMALL,), ("fwd",), "fp32", (64,), both, tmp_path, Console(quiet=True))
    assert [(row["variant"], row["options"], row["chunk_size"]) for row in rows] == [
        *(("torch", asdict(options), 64) for options in both), ("rival", None, 128), ("rival", None, 256)]


def test_auto_is_measured_once_where_it_keeps_nothing_anyway(tmp_path, clock, monkeypatch):
    monkeypatch.setitem(SECONDS_OF, ("auto", 64), 3.0)
    sets = Options(), Options(save_states=False), Options(keep_bytes=9), Options(keep_bytes=9, save_states=False)
    rows = bench.run(("auto",), None, (SMALL,), ("fwd",), "fp32", (64,), sets, tmp_path, Console(quiet=True))
    assert [row["options"] for row in rows] == [asdict(sets[n]) for n in (0, 2, 3)]


def test_auto_has_rows_of_its_own(tmp_path, clock, monkeypatch):
    """With the choice, which is torch's form here."""
    monkeypatch.setitem(SECONDS_OF, ("auto", 64), 3.0)
    console = Console(quiet=True)
    rows = bench.run(("auto",), None, (SMALL,), ("fwd", "fwd_bwd"), "fp32", (64,), [Options()], tmp_path, console)
    assert [(row["variant"], row["mode"], row["note"]) for row in rows] == [("auto", "fwd", None), ("auto", "fwd_bwd", None)]
    assert all(row["err_rms"] < 1e-5 and record.has_default_options(row) for row in rows)


def test_what_follows_from_a_time(run, rival):
    (_, row, peer, _), _ = run()
    ideal = cost.count_ideal_forward(SMALL.problem(64, "fp32"))
    assert row["p50_us"] == 1000 and row["graph_p50_us"] == 900
    assert row["ideal_bytes"] == ideal.bytes
    assert row["effective_gbps"] == pytest.approx(ideal.bytes / 1e-3 / 1e9)
    assert row["sol"] == pytest.approx(ideal.bytes / 4000e9 / 1e-3)
    assert row["tflops"] == pytest.approx(ideal.flops / 1e-3 / 1e12)
    # Against the rival at its better chunk size.
    assert (row["against"], row["against_p50_us"], row["against_graph_p50_us"]) == ("rival", 3000, 2700)
    assert row["speedup"] == pytest.approx(3) and row["graph_speedup"] == pytest.approx(3)
    assert "against" not in peer


def test_a_failed_capture_is_noted(run, rival, monkeypatch):
    failing = Mock(side_effect=RuntimeError("operation not permitted\nwhen stream is capturing"))
    monkeypatch.setattr(timing, "capture", failing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    rows, _ = run()
    assert all(row["graph_p50_us"] is None for row in rows)
    assert rows[0]["note"] == "no CUDA graph: operation not permitted"
    assert rows[0]["speedup"] and rows[0]["graph_speedup"] is None


def test_what_cannot_run_does_not_stop_the_rest(run, rival, monkeypatch):
    scan = bench.ssd_chunk_scan

    def picky(*, chunk_size, **arguments):
        if chunk_size == 32:
            raise ValueError("chunk [32] is too small\nfor this test")
        return scan(chunk_size=chunk_size, **arguments)

    monkeypatch.setattr(bench, "ssd_chunk_scan", picky)
    rows, text = run()
    assert [row["chunk_size"] for row in rows] == [64, 128, 256]
    assert "small fwd: torch at chunk size 32 is left out: chunk [32] is too small" in text


def test_a_peer_that_is_not_installed(run, monkeypatch):
    def get_variant(name):
        if name == "rival":
            raise ImportError("no module named rival")
        return Variant(name, None)

    monkeypatch.setattr(bench, "get_variant", get_variant)
    rows, text = run()
    assert "rival is left out: no module named rival" in text
    assert len(rows) == 2 and not any("against" in row for row in rows)


def test_a_wrong_result_is_recorded_as_such(run, rival, monkeypatch):
    scan = bench.ssd_chunk_scan
    monkeypatch.setattr(bench, "ssd_chunk_scan", lambda **arguments: scan(**arguments) * float("nan"))
    rows, _ = run()
    assert rows[0]["err_rms"] is None and rows[0]["note"] == "the result is not finite"


def test_mamba_ssm_at_chunks_of_64_in_short_sequences_alone():
    from experiments.bench import _list_chunk_sizes

    assert _list_chunk_sizes("mamba_ssm", 512, (16,)) == [64, 128, 256]
    assert _list_chunk_sizes("mamba_ssm", 513, (16,)) == [128, 256]
    assert _list_chunk_sizes("persistent", 4096, (16, 64)) == [16, 64]
