"""The collection without a GPU: a real run under the real profiler, whose trace then gives way to one that has kernels."""

import json
from pathlib import Path

import pytest

from experiments import counters, record
from experiments.characterize import collect, commands, trace
from experiments.workloads import workload_names
from tests.experiments.invoke import invoke
from tests.experiments.small import small_run, without_gpu

SYNTHETIC = trace.read(Path(__file__).parent / "traces" / "synthetic_step.json")


@without_gpu
@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_rows_of_a_run(small, tmp_path, monkeypatch):
    seen = []

    def read(path):
        events = json.loads(path.read_text())["traceEvents"]
        seen.extend(event["name"] for event in events if event.get("cat") == "user_annotation")
        return SYNTHETIC

    monkeypatch.setattr(trace, "read", read)
    run = small_run(steps=20)
    rows = collect.append_breakdown(run, tmp_path / "rows", tmp_path / "kept" / "trace.json")
    counts = {name: seen.count(f"ssd:{name}") for name in ("step", "forward", "backward", "optimizer")}
    assert counts == dict.fromkeys(counts, collect.PROFILED)
    assert record.read(tmp_path / "rows", bench="characterize") == rows and (tmp_path / "kept" / "trace.json").exists()
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    forward = next(row for row in rows if (row["phase"], row["operator"]) == ("forward", "ssm"))
    assert (forward["us"], forward["launches"], forward["workload"], forward["mixer"]) == (
        150 / collect.PROFILED, 2 / collect.PROFILED, "mamba2", "ssd")
    assert next(row["us"] for row in rows if row["operator"] == "idle") == pytest.approx(116 / collect.PROFILED)


@pytest.mark.parametrize("flops, expected", [([2 * 8192**3], 1.0), ([8192**3, 0.5 * 8192**3], 0.75)])
def test_calibration(monkeypatch, tmp_path, flops, expected):
    launches = [{"kernel": "nvjet", counters.TENSOR_FLOPS: value} for value in flops]
    asked = []
    monkeypatch.setattr(counters, "run_ncu", lambda *arguments: asked.append(arguments) or launches)
    assert collect.calibrate(tmp_path) == expected
    assert record.read(tmp_path, bench="calibration")[0]["flops_found"] == expected
    ((command, *rest),) = asked
    assert rest == [[counters.TENSOR_FLOPS], "none"]
    monkeypatch.setattr(collect, "run_product", lambda: asked.clear())
    assert invoke(*command).exit_code == 0 and not asked


def test_runs():
    found = [(run.preset, run.mixer, run.variant) for run in commands._list_runs("mamba2:1.3b,mambavision:T,mambavision:T/ssd",
                                                                         ["fused", "baseline"], "bf16", True)]
    assert found == [("1.3b", "ssd", "fused"), ("1.3b", "ssd", "baseline"), ("T", "mamba1", "auto"), ("T", "ssd", "fused"),
                     ("T", "ssd", "baseline")]
    assert [run.variant for run in commands._list_runs("mambavision:T", ["fused", "mamba_ssm", "auto"], "bf16", True)] == [
        "auto", "mamba_ssm"]
    assert [run.batch for run in commands._list_runs("mamba2:1.3b", ["fused"], "bf16", True, 1)] == [1]
    assert {run.workload for run in commands._list_runs(commands._WORKLOADS, ["fused"], "bf16", False)} == {*workload_names()}
