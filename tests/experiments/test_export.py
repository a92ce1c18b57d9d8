"""A trained model leaves as others read it, with the logits that it had; what has no such form is refused by name."""

import re

import pytest
import torch
from rich.console import Console

from experiments import checkpoints
from experiments.export import export
from experiments.train import train
from experiments.workloads import get_workload
from ssd.modules import Mamba2LM
from tests.experiments.invoke import invoke
from tests.experiments.small import read_saved, small_run

pytestmark = pytest.mark.usefixtures("small")
QUIET = Console(quiet=True)


@pytest.mark.parametrize("tied", (True, False))
def test_the_trained_model(tied, tmp_path, monkeypatch):
    preset = get_workload("mamba2").presets["small"]
    monkeypatch.setitem(vars(preset.sizes), "tie_embeddings", tied)  # frozen
    run = small_run(steps=2)
    train(run, tmp_path / "run", QUIET)
    assert export(tmp_path / "run", tmp_path / "weights", QUIET) == 2
    trained = get_workload("mamba2").build(run.sizes, "torch")
    trained.load_state_dict(read_saved(tmp_path / "run"), strict=False)
    if tied:
        trained.lm_head.weight = trained.embedding.weight
    ids = torch.randint(256, (2, 40))
    torch.testing.assert_close(Mamba2LM.from_pretrained(tmp_path / "weights", variant="torch")(ids), trained(ids))


def test_the_last_good_checkpoint_is_taken(tmp_path, console):
    train(small_run(steps=2, save_every=1), tmp_path / "run", QUIET)
    (checkpoints.latest(tmp_path / "run/checkpoints") / "state.json").write_text("{")
    assert export(tmp_path / "run", tmp_path / "weights", console) == 1
    assert "step-00000002" in console.export_text()


@pytest.mark.parametrize("change, says", [({"of_another_version": 1}, "of another version of this program"),
                                          ({"preset": "states"}, "whose backbone.layers.0.mixer.* are not those")])
def test_a_run_that_is_not_what_it_was(change, says, tmp_path, monkeypatch):
    train(small_run(steps=1), tmp_path, QUIET)
    read = checkpoints.read_state
    monkeypatch.setattr(checkpoints, "read_state", lambda path: (state := read(path)) | {"run": state["run"] | change})
    with pytest.raises(ValueError, match=says):
        export(tmp_path, tmp_path / "weights", QUIET)
    assert not (tmp_path / "weights").exists()


def test_what_cannot_be_exported(tmp_path):
    train(small_run("hybrid", steps=1), tmp_path / "hybrid", QUIET)
    train(small_run(steps=1), tmp_path / "mamba2", QUIET)
    full = tmp_path / "full"
    full.mkdir()
    (full / "a.txt").write_text("")
    for run, to, says in (("nothing", "new", "--from: got .*nothing, expected the folder of a run"),
                          ("mamba2", "full", "--to: got .*full, where there is something"),
                          ("mamba2", "full/a.txt", "Invalid value for .--to"),
                          ("hybrid", "new", "--from: got a run of hybrid small, expected one of mamba2")):
        result = invoke("export", "--from", tmp_path / run, "--to", tmp_path / to)
        assert result.exit_code == 2 and re.search(says, " ".join(result.output.split())), result.output
    assert [path.name for path in full.iterdir()] == ["a.txt"] and not (tmp_path / "new").exists()
    assert "from_pretrained" in invoke("export", "--from", tmp_path / "mamba2", "--to", tmp_path / "new").output
