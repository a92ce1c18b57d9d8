"""Training, pruning, a bridge and fine-tuning, by the command line; what was trained stays as it was."""

import json
from dataclasses import replace

import pytest
import torch

from experiments import record
from experiments.pruning import commands, losses
from experiments.train import train
from experiments.training_run import Run
from experiments.workloads import get_workload
from ssd import pruning
from ssd.pruning import find_blocks, load
from tests.experiments.invoke import invoke
from tests.experiments.small import VARIANT, small_run
from tests.experiments.test_train import QUIET

pytest.importorskip("safetensors", reason="safetensors is not installed")
pytestmark = pytest.mark.usefixtures("small")
SHORT = ("--finetune", 2, "--calibration", 2, "--evaluation", 1, "--ratio", 0.5)


def test_a_model_is_trained_pruned_and_fine_tuned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ("prune", "--workload", "mamba2:states", "--variant", VARIANT, "--score", "activity,random", "--steps", 3, *SHORT,
             "--out", tmp_path / "rows")
    first = invoke(*given)
    assert first.exit_code == 0, first.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    rows = record.read(tmp_path / "rows", bench="prune")
    assert [(row["score"], row["ratio"]) for row in rows] == [("none", 0.0), ("activity", 0.5), ("random", 0.5)]
    whole, *pruned = rows
    assert whole["loss_pruned"] == whole["loss_whole"] and whole["bridged"] is None
    assert all(row["parameters"] == whole["parameters"] - 2 * 2 * 2 * 16 * (32 + 5) for row in pruned), "rows of B and C"
    losses = [row[key] for row in rows for key in ("loss", "loss_pruned")]
    assert all(0 < loss < 7 for loss in losses) and len({*losses}) == 6
    assert "fine-tuned" in first.stdout and "activity" in first.stdout
    shown = invoke("table", "--bench", "prune", "--out", tmp_path / "rows").stdout
    assert shown.count("\n") == 2 + 3 and "| states |" in shown

    kept = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    again = invoke(*given, "--ratio", 0.5)
    assert again.exit_code == 0 and again.stdout.count("done before") == 3
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == kept
    config = json.loads((folder / "pruned" / "states-0.5-activity-2" / "model" / "config.json").read_text())
    assert config["pruning"]["score"] == "activity" and Run(**config["run"]) == Run(**whole["run"])

    start = folder / "pruned" / "states-0.5-activity-2" / "model"
    row = train(small_run(preset="states", steps=1, start=str(start)), tmp_path / "more", QUIET, rows=tmp_path / "rows")
    assert row["parameters"] == pruned[0]["parameters"]
    wrong = invoke("train", "--preset", "tiny", "--variant", VARIANT, "--start", start, "--out", tmp_path / "wrong")
    assert wrong.exit_code == 2 and wrong.stderr.startswith(f"error: --start: folder: got {start}, with the blocks layers.0.")


def test_heads_of_a_run_that_was_trained_before(tmp_path):
    run = small_run(steps=2)
    train(run, tmp_path / "run", QUIET, rows=tmp_path / "trained")
    kept = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    done = invoke("prune", "--trained", tmp_path / "run", "--kind", "heads", "--score", "activity", "--no-bridge", *SHORT,
                   "--out", tmp_path / "rows")
    assert done.exit_code == 0, done.stderr
    _, row = record.read(tmp_path / "rows", bench="prune")
    assert row["kind"] == "heads" and row["loss_bridged"] is None and Run(**row["run"]) == run
    assert {path: path.read_bytes() for path in kept} == kept
    model = get_workload("mamba2").build(run.sizes, run.variant, False)
    load(model, tmp_path / "run" / "pruned" / "heads-0.5-activity-2-unbridged" / "model")
    assert {block.nheads for block in find_blocks(model).values()} == {2}


def test_mamba1_is_pruned_too(tmp_path):
    run = small_run("mambavision", mixer="mamba1", variant="auto" if torch.cuda.is_available() else "torch", steps=1, batch=4)
    plan = losses.Plan(run, tmp_path, finetune=0, calibration=1, evaluation=1, out=tmp_path)
    whole, row = losses.run(plan, QUIET)
    assert row["parameters"] < whole["parameters"] and row["loss"] is None and row["bridged"] is None
    assert losses.run(replace(plan, again=True), QUIET)[1]["loss_pruned"] == pytest.approx(row["loss_pruned"], rel=1e-5)


def test_a_run_that_saves_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--trained: got .*, a run with --save-every 0, expected one that saves its last"):
        losses.run(losses.Plan(small_run(save_every=0), tmp_path), QUIET)


def test_a_run_of_other_settings_is_not_pruned_as_if_it_had_these(tmp_path):
    run = small_run(steps=2)
    train(run, tmp_path, QUIET, rows=tmp_path / "trained")
    for settings, said in (({"steps": 1}, "--steps: got 1, expected 2"), ({"seed": 5}, "--seed: got 5, expected")):
        with pytest.raises(ValueError, match=said):
            losses.run(losses.Plan(replace(run, **settings), tmp_path, "heads"), QUIET)
    assert not (tmp_path / "pruned").exists()


def test_names_are_the_librarys():
    assert (commands.KINDS, commands.SCORES) == (pruning.KINDS, pruning.SCORES)
