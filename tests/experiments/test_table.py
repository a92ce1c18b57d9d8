import csv
import io

import pytest
from rich.console import Console

from experiments import table
from tests.experiments.rows import compare, ssd_row, write


def test_best_chunk_of_the_latest_rows(tmp_path):
    write(tmp_path, ssd_row(chunk_size=64, p50_us=500.0, time="2026-01-01T00:00:00+00:00"),
          ssd_row(chunk_size=64, p50_us=900.0, time="2026-01-02T00:00:00+00:00"),
          ssd_row(chunk_size=128, p50_us=800.0), ssd_row(mode="bwd", p50_us=2000.0))
    assert [(r["mode"], r["chunk_size"], r["p50_us"]) for r in table.read_latest(tmp_path)] == [
        ("fwd", 128, 800.0), ("bwd", 128, 2000.0)]
    assert len(table.read_latest(tmp_path, all_chunks=True)) == 3


def test_the_kernels_decide_and_not_their_launches(tmp_path):
    write(tmp_path, ssd_row(chunk_size=64, p50_us=500.0, graph_p50_us=400.0), ssd_row(p50_us=700.0, graph_p50_us=300.0),
          ssd_row(chunk_size=256, p50_us=450.0, graph_p50_us=None))
    assert [r["chunk_size"] for r in table.read_latest(tmp_path)] == [128]


def test_rows_beside_a_rival(tmp_path):
    """A later one without does not take the place of a comparison; what has none is shown as it is."""
    write(tmp_path, ssd_row("fused", p50_us=800.0, **compare()), ssd_row("fused"), ssd_row("mamba_ssm"), ssd_row("persistent"))
    found = {row["variant"]: row["p50_us"] for row in table.read_latest(tmp_path, compared=True)}
    assert found == {"fused": 800.0, "mamba_ssm": 1000.0, "persistent": 1000.0}
    assert {row["variant"]: row["p50_us"] for row in table.read_latest(tmp_path)}["fused"] == 1000.0


def test_commits_are_not_mixed(tmp_path):
    """A chunk size that was measured at an earlier commit only is out of the running, and a faster one of it too."""
    old = {"git_sha": "1" * 40, "graph_p50_us": 100.0}
    write(tmp_path, ssd_row(chunk_size=64, **old), ssd_row(chunk_size=64, mode="bwd", **old), ssd_row(graph_p50_us=300.0))
    assert [(r["mode"], r["chunk_size"]) for r in table.read_latest(tmp_path)] == [("fwd", 128), ("bwd", 64)]


def test_markdown():
    text = table.render([ssd_row(**compare()), ssd_row("mamba_ssm", p50_us=1250.0)], "markdown")
    header, rule, ours, peer = text.splitlines()
    assert "graph speed-up" in header and set(rule) <= set("| :-") and len(rule.split("|")) == len(header.split("|"))
    cells = [cell.strip() for cell in ours.strip("|").split("|")]
    assert cells[:6] == ["8b-b4", "fwd", "baseline", "128", "1000", "990"]
    assert cells[-3:] == ["mamba_ssm", "1.25", "1.25"]
    assert [cell.strip() for cell in peer.strip("|").split("|")][-3:] == ["", "", ""]


def test_gpus_are_named_where_there_are_several():
    rows = [ssd_row(), ssd_row(gpu="NVIDIA H100 80GB HBM3")]
    header, _, *lines = table.render(rows, "markdown").splitlines()
    assert header.startswith("| GPU | shape |") and [line.split(" | ")[0] for line in lines] == [
        "| NVIDIA H200", "| NVIDIA H100 80GB HBM3"]
    assert "GPU" not in table.render(rows[:1], "markdown").splitlines()[0]


def test_csv_keeps_every_key():
    row = ssd_row(**compare())
    (parsed,) = csv.DictReader(io.StringIO(table.render([row], "csv")))
    assert parsed.keys() == row.keys()
    assert float(parsed["p50_us"]) == 1000.0


@pytest.mark.parametrize("name", ("COLUMNS", "ABLATION", "BLOCK", "STEPS", "COUNTERS", "KERNELS"))
def test_a_table_fits_100_columns_and_cuts_nothing(name):
    """Of long names and numbers. The title has the GPU and the commit, empty columns are left out, `wide` has every column."""
    columns = getattr(table, name)
    long = {
        "shape": "graphmamba-peptides" if name == "BLOCK" else "sweep-16384", "mode": "fwd_train", "variant": "persistent",
        "part": "selective_scan", "workload": "mambavision", "preset": "malnet-tiny", "mixer": "mamba1", "step": "without",
        "mean_dram_pct": 57.25, "changed": "low_precision_CB", "kernel": "selective_scan_walk_bwd_kernel", "dram_pct": 100.0,
        "ssm_us": 1234.5e3}
    row = ssd_row(p50_us=116431.0, **compare(), seqlen=1048576, relative=0.5, unit="tokens", dram_bytes=123456e6,
                  occupancy_pct=99.9, tensor_pct=99.9, registers=255, blocks=100000, loss=10.123) | long
    row["of_copy"] = table.compare_with_copy(row)
    console = Console(width=100, record=True, file=io.StringIO())
    table.show(console, [row], "medians", columns)
    text = console.export_text(clear=False)
    assert max(map(len, text.splitlines())) <= 100 and "…" not in text
    assert "NVIDIA H200, bf16, commit 0000000" in text
    for header, (key, to_text) in table.NARROW[name].items():
        shown = to_text(row.get(key))
        assert (header in text) == bool(shown) and shown in text, header
    table.show(console, [row], "medians", columns, wide=True)
    text = console.export_text()
    assert all(header in text for header in columns)


def test_the_least_of_a_rival_counts():
    """Where its last rows say less than the run that a row is of: in GPU time, and of the same shape and direction."""
    rows = [ssd_row(p50_us=110.0, **compare(2.0)), ssd_row(p50_us=110.0, mode="bwd", **compare(2.0)), ssd_row("fused")]
    rivals = [ssd_row("mamba_ssm", p50_us=us, chunk_size=size) for us, size in ((160.0, 64), (1000.0, 128))]
    better, same, alone = table.compare_with_least(rows, rivals)
    assert better["graph_speedup"] == pytest.approx(1.5) and better["speedup"] == 2.0
    assert (same, alone) == tuple(rows[1:])
    assert table.compare_with_least(rows, []) == rows


def test_the_share_of_a_copy_is_of_the_time_beside_it():
    row = ssd_row(graph_p50_us=500.0, p50_us=1000.0, ideal_bytes=1e9, copy_gbps=4000.0)
    assert table.compare_with_copy(row) == 0.5 and table.compare_with_copy(row | {"graph_p50_us": None}) == 0.25
