"""ncu's output, by hand and as it was on a GPU; what is made of it; and the table of rows.

ncu/*.csv is what `counters.profile` of `persistent` at 130m-b8, bwd, bf16, chunks of 256, had from ncu on an H200, in
its three runs and, `brief`, in one; trimmed to the metrics that were asked for and a few beside them, without process numbers.
"""

import contextlib
import io
import os
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest
import torch

from experiments import bench, counters, record, timing
from experiments.inputs import make_inputs
from experiments.shapes import SHAPES, SMALL
from ssd import Options
from tests.experiments.invoke import invoke
from tests.experiments.rows import ENVIRONMENT, kernel_row, ssd_row, write

RECORDED = Path(__file__).parent / "ncu"
WARM = (counters._TIME, counters._READ, counters._WRITE, *counters._WARM.values())
NAMES = ("ID", "Kernel Name", *WARM, *counters._COLD.values())
# L1 hits and waves; instructions and FLOPs of the tensor cores; additions, multiplications, both in one, exponentials; stalls
REST = (5.0, 1.5, 1_000, 2_000_000, 30, 20, 10, 40, 3.0, 0.5, 0.4, 0.3, 0.2, 0.1)
# time, read, written; dram %, occupancy %, registers, block cycles, blocks; L2 hits, tensor, issue and shared %
LAUNCHES = (
    (0, "_chunk_state", 10_000, 20_000_000, 4_000_000, 50.0, 25.0, 128, 4_000, 512, 60.0, 30.0, 40.0, 50.0, *REST),
    (1, "_chunk_state", 30_000, 60_000_000, 40_800_000, 70.0, 25.0, 96, 8_000, "1,536", 40.0, 10.0, 40.0, 50.0, *REST),
    (2, "_bmm_chunk", 10_000, 4_000_000, 800_000, 10.0, 12.0, 96, 2_000, 64, 80.0, 60.0, 20.0, 10.0, *REST))
BLOCKS = ("block_cycles", "blocks", "tensor_pct", "issue_pct", "shared_pct", "l1_hit_pct", "tensor_flops", "ffmas")


def raw(*launches, names=NAMES) -> str:
    lines = (names, ("",) * len(names), *launches)
    return "==PROF== Profiling\n" + "".join(",".join(f'"{cell}"' for cell in line) + "\n" for line in lines)


def leave_out(metric: str, *launches) -> str:
    """ncu's output where it leaves out a metric that it does not know."""
    kept = [n for n, name in enumerate(NAMES) if name != metric]
    return raw(*([launch[n] for n in kept] for launch in launches), names=[NAMES[n] for n in kept])


def read(text: str) -> list[dict]:
    return [counters._make_launch(launch) for launch in counters.parse(text)]


def test_parse_of_nothing():
    with pytest.raises(ValueError, match="no kernels"):
        counters.parse("==ERROR== no counters for you\n")


@pytest.mark.parametrize("key", BLOCKS)
@pytest.mark.parametrize("cell", ("n/a", "(!) n/a", "nan", "", None))
def test_a_metric_that_ncu_does_not_know(key, cell):
    metric = (counters._WARM | counters._COLD)[key]
    place = NAMES.index(metric)
    unknown = [(*launch[:place], cell, *launch[place + 1 :]) for launch in LAUNCHES]
    kernels = counters.merge_by_kernel(read(leave_out(metric, *LAUNCHES) if cell is None else raw(*unknown)))
    known = counters.merge_by_kernel(read(raw(*LAUNCHES)))
    assert kernels == [{name: value for name, value in kernel.items() if name != key} for kernel in known]


def test_what_there_must_be():
    with pytest.raises(ValueError, match="_chunk_state has no dram__bytes_read"):
        read(leave_out(counters._READ, *LAUNCHES))


def test_kernels_are_weighted_with_time():
    state, bmm = counters.merge_by_kernel(read(raw(*LAUNCHES)))
    assert (state["launches"], bmm["launches"]) == (2, 1)
    assert (state["ncu_us"], state["dram_bytes"], state["blocks"], state["registers"]) == (40, 124_800_000, 2048, 128)
    assert state["dram_pct"] == pytest.approx(65.0)
    assert state["l2_hit_pct"] == pytest.approx(45.0)
    assert state["block_cycles"] == pytest.approx(7000)
    assert state["tensor_pct"] == pytest.approx(15.0)
    assert (state["tensor_flops"], state["ffmas"], state["exps"]) == (4_000_000, 20, 80), "counts add up"
    assert state["stall_long_scoreboard"] == pytest.approx(3.0)


@pytest.fixture
def ncu(monkeypatch):
    """ncu without one: it prints LAUNCHES, or what `said` holds, and keeps its command lines."""
    fake = SimpleNamespace(commands=[], said=raw(*LAUNCHES), status=0)

    def run(command, **_):
        fake.commands.append(command)
        if command[0] != "ncu":
            Path(os.environ[counters.autotuned_configs._FILE]).write_text("{}")
            return SimpleNamespace(returncode=0)
        with open(command[command.index("--log-file") + 1], "w") as log:
            log.write(fake.said)
        return SimpleNamespace(returncode=fake.status, stderr="")

    monkeypatch.setattr(counters.subprocess, "run", run)
    monkeypatch.setattr(counters.shutil, "which", lambda name: name)
    monkeypatch.setattr(record, "environment", lambda: ENVIRONMENT)
    return fake


def test_rows(ncu, tmp_path, console):
    counters.run([ssd_row(), ssd_row("mamba_ssm")], tmp_path, console)
    rows = record.read(tmp_path, bench="counters")
    assert [(row["variant"], row["kernel"]) for row in rows] == [
        (variant, kernel) for variant in ("baseline", "mamba_ssm") for kernel in ("_chunk_state", "_bmm_chunk")]
    assert all(key in row for row in rows for key in BLOCKS)
    text = console.export_text()
    assert all(said in text for said in ("_chunk_state", "_bmm_chunk", "mamba_ssm 8b-b4 fwd, chunk 128", "mean over launches"))
    assert [command[0] == "ncu" for command in ncu.commands] == 3 * [True] + [False] + 3 * [True], "upstream is tuned before"


def test_recorded(ncu, monkeypatch):
    """Every number is the cell that another reader of CSV finds; products are as many as the shape has."""
    runs = {}
    for name in ("warm", "cold", "hits", "brief"):
        text = (RECORDED / f"{name}.csv").read_text()
        runs[name] = text, pandas.read_csv(io.StringIO(text[text.index('"ID"'):]), skiprows=[1]).to_dict("records")
    said = iter(runs.values())
    write = counters.subprocess.run

    def run(command, **how):
        ncu.said = next(said)[0]
        return write(command, **how)

    monkeypatch.setattr(counters.subprocess, "run", run)
    launches, brief = counters.profile(["a call"]), counters.profile(["a step"], brief=True)
    kernels = [f"{name}_kernel" for name in ("chunk_cumsum", "hopper_states", "hopper_group", "chunk_cumsum_bwd", "sum_parts")]
    assert [launch["kernel"] for launch in launches] == [launch["kernel"] for launch in brief] == kernels
    for launch, warm, cold, hits in zip(launches, *(runs[name][1] for name in ("warm", "cold", "hits")), strict=True):
        assert launch["ncu_us"] == warm["gpu__time_duration.sum"] / 1000
        assert launch["dram_bytes"] == warm["dram__bytes_read.sum"] + warm["dram__bytes_write.sum"]
        for metrics, cells in ((counters._WARM, warm), (counters._COLD, cold), (counters._HITS, hits)):
            assert {key: launch[key] for key in metrics} == {key: cells[metric] for key, metric in metrics.items()}
        assert launch["blocks"] == warm["launch__grid_size"]
    for launch, one_run in zip(launches, brief, strict=True):
        assert one_run["tensor_flops"] == launch["tensor_flops"] and one_run["fadds"] == launch["fadds"]
        assert "l2_hit_pct" not in one_run
    shape = SHAPES["130m-b8"]
    walk = 2 * shape.batch * shape.seqlen * shape.nheads * shape.headdim * shape.dstate  # every token's x B^T
    assert launches[1]["tensor_flops"] == walk and launches[0]["tensor_flops"] == 0


def test_what_ncu_runs_is_what_the_row_measured(ncu, monkeypatch):
    seen = []
    monkeypatch.setattr(counters, "run_call", lambda **call: seen.append(tuple(call.values())))
    options = Options(tf32=True, exp2=False)
    rows = (ssd_row("fused", mode="bwd", chunk_size=64, options=vars(options)), ssd_row("mamba_ssm"))
    for row in rows:
        counters.profile(counters._make_arguments(row))
    for command in ncu.commands:
        result = invoke(*command[command.index("experiments") + 1 :])
        assert result.exit_code == 0, result.output
    assert seen == 3 * [("fused", "8b-b4", "bwd", "bf16", 64, vars(options))] + 3 * [
        ("mamba_ssm", "8b-b4", "fwd", "bf16", 128, None)]


@pytest.mark.parametrize("mode", ("fwd", "bwd"))
def test_profiled(mode, monkeypatch):
    """The call runs after warm-up, once between the profiler's start and stop."""
    seen = []
    scan = bench.ssd_chunk_scan
    monkeypatch.setattr(bench, "ssd_chunk_scan", lambda **call: seen.append(call["options"]) or scan(**call))
    monkeypatch.setattr(torch.autograd, "grad", lambda *_, **__: seen.append("grad"))
    monkeypatch.setattr(bench, "make_inputs", lambda shape, dtype, device, **other: make_inputs(shape, dtype, "cpu", **other))
    monkeypatch.setattr(timing, "side_stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: seen.append(name))
    monkeypatch.setitem(SHAPES, "small", SMALL)
    options = Options(exp2=False)
    counters.run_call("torch", "small", mode, "fp32", 32, {"exp2": False})
    assert seen == {"fwd": [*[options] * 3, "start", options, "stop"],
                    "bwd": [options, *["grad"] * 3, "start", "grad", "stop"]}[mode]


def test_a_failure_of_ncu_does_not_stop_the_rest(ncu, tmp_path, console):
    ncu.said, ncu.status = "==ERROR== ERR_NVGPUCTRPERM\n", 9
    counters.run([ssd_row(), ssd_row("fused")], tmp_path, console)
    text = console.export_text()
    for variant in ("baseline", "fused"):
        assert f"{variant} 8b-b4 fwd: ncu gave none: exit status 9: ==ERROR== ERR_NVGPUCTRPERM" in text
    assert not record.read(tmp_path)


def test_calls_side_by_side(tmp_path):
    blocks = dict.fromkeys(BLOCKS, 30.0) | {"block_cycles": 4000.0, "blocks": 512.0}
    write(tmp_path, kernel_row("_chunk_state", "fused", mode="bwd"), kernel_row("_chunk_state"),
          kernel_row("_chunk_scan", ncu_us=60.0, dram_bytes=6e6, dram_pct=10.0, registers=255.0),
          kernel_row("_chunk_state", "fused", **blocks),
          kernel_row("_scan", "fused", ncu_us=60.0, **blocks | {"block_cycles": 8000.0}))
    found = counters.read_latest(tmp_path)
    assert [(call["mode"], call["variant"], call["launches"]) for call in found] == [
        ("fwd", "fused", 2), ("fwd", "baseline", 2), ("bwd", "fused", 1)]
    fused, baseline, _ = found
    assert (baseline["dram_bytes"], baseline["mean_dram_pct"], baseline["registers"]) == (54e6, 30.0, 255.0)
    assert baseline["dram_pct"] == pytest.approx(20.0)
    assert not baseline.keys() & set(BLOCKS)
    assert (fused["blocks"], fused["tensor_pct"]) == (1024, 30.0) and fused["block_cycles"] == pytest.approx(7000)


@pytest.mark.parametrize("change", [{}, {"git_sha": "1" * 40}, {"git_sha": "1" * 40, "chunk_size": 64}])
def test_kernels_of_an_earlier_run_are_not_counted(tmp_path, change):
    """A kernel that the call no longer has, measured at this commit, at another, or at another in smaller chunks."""
    old = {"time": "2025-01-01T00:00:00+00:00", **change}
    write(tmp_path, kernel_row(**old), kernel_row("_gone", **old), kernel_row(dram_bytes=5e6))
    (call,) = counters.read_latest(tmp_path)
    assert (call["launches"], call["dram_bytes"]) == (1, 5e6)
