"""Checkpoints: whole or not there, the last two kept, and refused by file where they are damaged."""

import os
import random
import shutil
import subprocess
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from experiments import checkpoints


def make_trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """After a step; two parameters are one tensor, and the groups do not have the order of the model."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    groups = [{"params": [p for p in model.parameters() if p.dim() < 2]}, {"params": [model[0].weight], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, 0.1)
    optimizer.param_groups[0]["calls"] = torch.tensor(float(seed))  # as LAMB counts steps
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def save_steps(folder, *steps: int):
    """Checkpoints of the steps; returns the last."""
    for step in steps:
        last = checkpoints.save(folder, step, {"lr": 0.1}, *make_trained())
    return last


def test_what_was_saved_is_restored(tmp_path):
    last = save_steps(tmp_path, 3)
    model, optimizer = make_trained(1)
    assert checkpoints.restore(last, model, optimizer) == 3
    expected, expected_optimizer = make_trained()
    assert model[2].weight is model[0].weight
    for name, t in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], t)
    states = optimizer.state_dict()["state"], expected_optimizer.state_dict()["state"]
    for n, state in states[1].items():
        assert all(torch.equal(t, states[0][n][quantity]) for quantity, t in state.items())
    assert [group.get("calls") for group in optimizer.param_groups] == [0, None]
    state = checkpoints.read_state(last)
    assert (state["step"], state["run"]) == (3, {"lr": 0.1})


def test_the_last_two_are_kept(tmp_path):
    assert checkpoints.latest(tmp_path / "nowhere") is None
    last = save_steps(tmp_path, 8, 9, 10, 100000000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-100000000"]
    assert checkpoints.latest(tmp_path) == last


@pytest.mark.parametrize("function", ["rename", "fsync"])
def test_an_interrupted_save_leaves_what_was_there(tmp_path, monkeypatch, function):
    before = save_steps(tmp_path, 1, 2)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, function, Mock(side_effect=OSError(28, "No space left on device")))
        save_steps(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
    assert checkpoints.latest(tmp_path) == before and checkpoints.restore(before, *make_trained(1)) == 2


def test_a_killed_save_is_not_taken_for_a_checkpoint(tmp_path):
    last = save_steps(tmp_path, 1)
    shutil.copytree(last, tmp_path / ".step-00000002.1234")
    (tmp_path / ".step-00000002.1234" / "state.json").unlink()
    assert checkpoints.latest(tmp_path) == last


def test_copies_and_other_files_are_left_alone(tmp_path):
    save_steps(tmp_path, 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000001-best")
    (tmp_path / "step-00000001.txt").touch()
    last = save_steps(tmp_path, 2, 3, 4)
    assert checkpoints.latest(tmp_path) == last
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000001-best", "step-00000001.txt", "step-00000003", "step-00000004"]


FILES = ["shard-00001-model-00001-of-00001.safetensors", "state.json", "SHA256SUMS"]


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="sha256sum is not installed")
def test_checksums_are_those_of_sha256sum(tmp_path):
    last = save_steps(tmp_path, 1)
    assert subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=last, capture_output=True).returncode == 0
    assert sorted(path.name for path in last.iterdir()) == sorted(FILES)


@pytest.mark.parametrize("file", FILES)
def test_any_bit_that_changed_is_found(tmp_path, file):
    path, draw = save_steps(tmp_path, 1) / file, random.Random(0)
    checkpoints.verify(path.parent)
    content = path.read_bytes()
    for damage in range(40):
        changed = bytearray(content)
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed if damage % 4 else content[: draw.randrange(len(content))])
        with pytest.raises(checkpoints.Damaged, match=r"step-00000001/[\w.-]+: cannot be read \(.+\); remove") as error:
            checkpoints.verify(path.parent)
        assert file in str(error.value) or file == "SHA256SUMS"
    path.unlink()
    with pytest.raises(checkpoints.Damaged, match=f"{file}: cannot be read"):
        checkpoints.verify(path.parent)
    path.write_bytes(content)
    checkpoints.verify(path.parent)


def test_the_latest_good_one(tmp_path):
    assert checkpoints.latest_good(tmp_path / "nowhere") == (None, [])
    last = save_steps(tmp_path, 1, 2)
    assert checkpoints.latest_good(tmp_path) == (last, [])
    (last / FILES[0]).write_bytes(b"")
    found, damaged = checkpoints.latest_good(tmp_path)
    assert found == tmp_path / "step-00000001"
    assert [reason.what for reason in damaged] == [
        f"{last / FILES[0]}: cannot be read (its checksum is not the one in SHA256SUMS)"]
    (found / "state.json").unlink()
    found, damaged = checkpoints.latest_good(tmp_path)
    assert found is None and len(damaged) == 2


def test_a_damaged_one_makes_room_for_its_steps_when_they_are_taken_again(tmp_path):
    last = save_steps(tmp_path, 2, 4)
    (last / FILES[0]).write_bytes(b"")
    assert save_steps(tmp_path, 3) == tmp_path / "step-00000003"
    assert checkpoints.latest_good(tmp_path)[0] == tmp_path / "step-00000003" and (tmp_path / "step-00000002").exists()
    assert save_steps(tmp_path, 4) == last and checkpoints.latest_good(tmp_path) == (last, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize("bad", (float("nan"), float("inf"), -float("inf")))
@pytest.mark.parametrize("what", ("0.weight", "1.running_var", "0.bias/exp_avg"))
def test_what_is_not_finite_is_not_written(tmp_path, what, bad):
    before = save_steps(tmp_path, 1)
    model, optimizer = make_trained()
    name, _, quantity = what.partition("/")
    t = optimizer.state[dict(model.named_parameters())[name]][quantity] if quantity else model.state_dict()[name]
    t.view(-1)[0] = bad
    with pytest.raises(checkpoints.NotFinite, match=f"^{what}$"):
        checkpoints.save(tmp_path, 2, {}, model, optimizer)
    assert [path.name for path in tmp_path.iterdir()] == [before.name] and checkpoints.latest_good(tmp_path) == (before, [])
