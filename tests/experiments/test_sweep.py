"""Variants inside workloads: two rows each, what has them is not run again, and what fails costs nothing else."""

import csv
import io
import json
from dataclasses import replace

import pytest
import torch

from experiments import __main__ as command_line
from experiments import counters, record, step_time, sweep, table
from experiments import train as training
from experiments.characterize.gpus import find
from experiments.step_time import Candidate, put_inside
from experiments.training_step import Step
from experiments.workloads import get_workload
from ssd import Options
from tests.experiments.invoke import invoke
from tests.experiments.small import small_run, without_gpu
from tests.experiments.test_train import QUIET, before_step, terminate

pytestmark = pytest.mark.usefixtures("small")


@pytest.fixture
def plan(tmp_path) -> sweep.Plan:
    run = small_run(steps=3, save_every=0)
    return sweep.Plan((run,), ("torch", "auto"), repeats=2, warmup=1, folder=tmp_path / "runs", out=tmp_path / "rows")


def test_two_variants_give_a_table(plan):
    assert sweep.run(plan, QUIET) == []
    rows = sweep.read_latest(plan.out)
    assert [(row["variant"], row["workload"], row["preset"], row["mixer"]) for row in rows] == [
        ("torch", "mamba2", "small", "ssd"), ("auto", "mamba2", "small", "ssd")]
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-3) and all(row["p50_us"] > 0 for row in rows)
    text = table.render(rows, "markdown", table.STEPS)
    assert text.count("\n") == 4 and "tokens" in text
    assert "\\toprule" in table.render(rows, "latex", table.STEPS)
    (first, _) = csv.DictReader(io.StringIO(table.render(rows, "csv", table.STEPS)))
    assert float(first["p50_us"]) == rows[0]["p50_us"]


def test_what_has_its_row_is_not_run_again(plan, monkeypatch):
    sweep.run(replace(plan, variants=("torch",)), QUIET)
    trained = []
    monkeypatch.setattr(sweep, "train", lambda run, *_, **__: trained.append(run.variant))
    assert sweep.run(plan, QUIET) == [] and trained == ["auto"]
    steps = [row["variant"] for row in record.read(plan.out, bench="step")]
    assert steps == ["torch", "torch", "auto"], "times of two sittings do not compare"
    sweep.run(replace(plan, variants=("torch",), again=True), QUIET)
    assert trained == ["auto", "torch"] and len(record.read(plan.out, bench="step")) == 4


@without_gpu
def test_captured_steps_are_other_steps(plan):
    plan = replace(plan, trains=False)
    sweep.run(replace(plan, graph=None), QUIET)
    assert {row["not_captured"] for row in record.read(plan.out, bench="step")} == {"a CUDA graph needs a GPU, found none"}
    failed = sweep.run(replace(plan, graph=True), QUIET)
    assert failed == [f"mamba2 small ssd {name}: --graph: a CUDA graph needs a GPU, found none" for name in plan.variants]
    rows = record.read(plan.out, bench="step")
    assert [row["graph"] for row in rows] == [False, False, True, True]
    record.append(rows[0] | {"graph": True, "ssm_us": rows[0]["p50_us"] / 4}, plan.out)
    found = sweep.read_latest(plan.out)
    assert [row["variant"] for row in found] == ["torch", "auto", "torch"], "a captured step is no repetition of the other"
    assert found[2]["without_ssm_us"] == 0.75 * rows[0]["p50_us"] and found[0]["without_ssm_us"] is None


def test_steps_are_counted_once(plan, monkeypatch):
    """U, W and G of a step's row are from what ncu counted of the same step; one that it fails at costs no other, and is
    counted when it can be.
    """
    launch = {"kernel": "chunk_scan_kernel", "launches": 1, "ncu_us": 10.0, "dram_bytes": 24e6, "dram_pct": 50.0}
    asked = []

    def traffic(arguments, only, tunes):
        asked.append(json.loads(arguments[2])["run"]["batch"])
        if asked == [4]:
            raise ValueError("no permission")
        return [launch, launch | {"kernel": "bmm_chunk_kernel", "ncu_us": 30.0}]

    monkeypatch.setattr(counters, "count_traffic", traffic)
    monkeypatch.setattr(sweep, "find", lambda _: find("NVIDIA H200"))
    plan = replace(plan, runs=tuple(small_run(steps=3, save_every=0, batch=batch) for batch in (4, 2)), variants=("auto",),
                   trains=False, counts=True)
    (failed,) = sweep.run(plan, QUIET)
    assert failed == "mamba2 small ssd auto: ncu gave none: no permission" and asked == [4, 2]
    found = [(row["U"], row["W"]) for row in sweep.read_latest(plan.out)]
    assert found == [(None, None), pytest.approx((33.3, 25.0), rel=1e-2)]
    assert sweep.run(plan, QUIET) == [] and asked == [4, 2, 4]


@without_gpu
def test_what_fails_is_reported_and_the_rest_goes_on(plan):
    run = small_run("mambavision", mixer="mamba1", steps=2, save_every=0)
    plan = replace(plan, runs=(run, plan.runs[0]), variants=("mamba_ssm", "torch"))
    failed = sweep.run(plan, QUIET)
    trained = [(row["workload"], row["variant"]) for row in record.read(plan.out, bench="train")]
    assert trained == [("mambavision", "torch"), ("mamba2", "torch")]
    assert len(failed) == 4 and failed[0].startswith("mambavision small mamba1 mamba_ssm: ")
    assert [row["workload"] for row in sweep.read_latest(plan.out)] == ["mambavision", "mamba2"]
    before = len(record.read(plan.out, bench="step"))
    sweep.run(plan, QUIET)
    assert len(record.read(plan.out, bench="step")) == before, "what cannot run has its row, too"


def test_a_step_that_fails_costs_only_itself(plan, monkeypatch):
    original = get_workload("mamba2")

    def loss(model, batch):
        if model.layers[0].mixer.variant == "auto":
            raise RuntimeError("it does not fit\nat all")
        return original.loss(model, batch)

    broken = replace(original, loss=loss)
    monkeypatch.setattr("experiments.step_time.get_workload", lambda name: broken)
    monkeypatch.setattr(training, "get_workload", lambda name: broken)
    failed = sweep.run(plan, QUIET)
    assert failed == ["mamba2 small ssd auto: it does not fit"] * 2
    notes = {row["variant"]: row.get("note") for row in record.read(plan.out, bench="step")}
    assert notes == {"torch": None, "auto": "it does not fit"}


def test_a_sweep_that_was_ended_goes_on(plan, monkeypatch):
    plan, original = replace(plan, variants=("torch",)), Step.begin
    with monkeypatch.context() as patch, pytest.raises(training.Interrupted):
        before_step(patch, 2, terminate)
        sweep.run(plan, QUIET)
    taken = []
    monkeypatch.setattr(Step, "begin", lambda self, number: taken.append(number) or original(self, number))
    assert sweep.run(plan, QUIET) == [] and taken == [3]


def test_times_of_two_sittings_do_not_compare(plan):
    sweep.run(replace(plan, variants=("torch",)), QUIET)
    (row,) = record.read(plan.out, bench="step")
    (loss,) = [trained["loss"] for trained in record.read(plan.out, bench="train")]
    rival = row | {"variant": "mamba_ssm", "options": None, "p50_us": 2 * row["p50_us"],
                   "run": row["run"] | {"variant": "mamba_ssm"}}
    record.append(rival, plan.out)
    assert [row["speedup"] for row in sweep.read_latest(plan.out)] == [2.0, None]
    record.append(rival | {"run": rival["run"] | {"preset": "1.3b"}, "p50_us": 1.0}, plan.out)
    assert sweep.read_latest(plan.out)[0]["speedup"] == 2.0, "another's, begun in the same second"
    older = {name: value for name, value in row["options"].items() if name != "keep_bytes"}  # as before there was this one
    record.append(row | {"options": older, "sitting": "2001-01-02T00:00:00+00:00"}, plan.out)
    assert [row["speedup"] for row in sweep.read_latest(plan.out)] == [2.0, None, None], "the same step, timed alone"
    later = {"sitting": "2001-01-01T00:00:00+00:00"}
    record.append(rival | later, plan.out)
    record.append(row | later | {"variant": "baseline", "run": row["run"] | {"variant": "baseline"}}, plan.out)
    assert [row["speedup"] for row in sweep.read_latest(plan.out)] == [None, None, None, 2.0]
    record.append(row | {"run": row["run"] | {"steps": 7}}, plan.out)
    assert [row["loss"] for row in sweep.read_latest(plan.out)] == [loss, None, None, None, None], "of as many steps"


def test_variants_take_the_same_data(plan, monkeypatch):
    """Round by round, the second on other data than the first."""
    seen, original = {}, Step.__call__

    def take(self, number, batches):
        batches = list(batches)
        seen.setdefault(self.model.layers[0].mixer.variant, []).append([batch["input_ids"].sum().item() for batch in batches])
        return original(self, number, iter(batches))

    monkeypatch.setattr(Step, "__call__", take)
    run = small_run(steps=1, accumulate=2)
    step_time.measure_steps(run, [Candidate("torch"), Candidate("auto")], 6, 1, QUIET)
    assert seen["torch"] == seen["auto"] and len({str(sums) for sums in seen["torch"][-6:]}) == 4
    assert {len(sums) for sums in seen["torch"]} == {2}


def test_a_variant_is_put_into_every_mixer():
    model = get_workload("hybrid").build(get_workload("hybrid").presets["small"].sizes, "torch", False)
    put_inside(model, Candidate("fused", Options(exp2=False)))
    mixers = [layer.mixer for layer in model.layers if hasattr(layer.mixer, "variant")]
    assert [(m.variant, m.options) for m in mixers] == [("fused", Options(exp2=False))] * 2
    vision = get_workload("mambavision").build(small_run("mambavision", mixer="ssd").sizes, "torch", False)
    put_inside(vision, Candidate("fused", Options(exp2=False)))
    assert {(m.variant, m.options) for m in vision.modules() if hasattr(m, "variant")} == {("fused", Options(exp2=False))}
    scans = get_workload("mambavision").build(small_run("mambavision", mixer="mamba1").sizes, "torch", False)
    with pytest.raises(ValueError, match="Mamba1 knows no options"):
        put_inside(scans, Candidate("fused", Options(exp2=False)))
    with pytest.raises(ValueError, match="the model has no mixer with a variant"):
        put_inside(torch.nn.Linear(1, 1), Candidate("fused"))


def test_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setattr(command_line, "require_gpu", lambda *_: None)
    given = ("sweep", "--workload", "mamba2:small", "--steps", "2", "--dtype", "fp32", "--repeats", "2", "--warmup", "1",
             "--folder", tmp_path / "runs", "--out", tmp_path / "rows")
    result = invoke(*given, "--variant", "torch,auto")
    assert result.exit_code == 0, result.stderr
    assert "medians of a training step" in result.stdout
    shown = invoke("table", "--bench", "step", "--out", tmp_path / "rows")
    assert shown.exit_code == 0 and shown.stdout.count("small") == 2


def test_the_committed_losses_agree():
    """Whichever variant trained, and on however many GPUs, to the bands of docs/workloads.md. What one GPU has no memory for is
    held to other ways on several.
    """
    def settle(row: dict) -> tuple:
        """A step's samples may be one micro-batch or several."""
        run = row["run"]
        return row["git_sha"], run["batch"] * run["accumulate"], *record.settings(row, "save_every", "batch", "accumulate")

    rows, losses = record.read(bench="train"), {}
    alike = record.group_by(rows, settle)
    drawn = ("mambavision", "graphmamba")  # drop paths, dropout, orders of nodes: each process draws its own
    for row in rows:
        if row["gpus"] > 1:
            others = [other for other in alike[settle(row)] if (other["gpus"], other["way"]) != (row["gpus"], row["way"])]
            beside = ([other for other in others if other["gpus"] == 1] or others)[-1]
            assert row["loss"] == pytest.approx(beside["loss"], rel=0.05 if row["workload"] in drawn else 0.01), row
        else:
            run = [str(value) for name, value in row["run"].items() if name != "variant"]
            losses.setdefault((row["workload"], row["preset"], *run), []).append(row["loss"])
    bands = {("mamba2", "1.3b", "ssd"): 1.04, ("mambavision", "T", "mamba1"): 1.02}
    for (workload, preset, *run), found in losses.items():
        (mixer,) = {"ssd", "mamba1"} & set(run)
        assert max(found) / min(found) < bands.get((workload, preset, mixer), 1.01), (workload, preset, found)
