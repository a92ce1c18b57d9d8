"""Checkpoints: whole or not there, the last two kept, and refused by file where they are damaged."""

import os
import shutil

import pytest
import torch
from torch import nn

from experiments import checkpoints


def made(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """After a step; two parameters are one tensor, and the groups do not have the order of the model."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    groups = [{"params": [p for p in model.parameters() if p.dim() < 2]}, {"params": [model[0].weight], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, 0.1)
    optimizer.param_groups[0]["calls"] = torch.tensor(float(seed))  # as timm's LAMB counts steps
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def saved(folder, *steps: int):
    """Checkpoints of the steps; returns the last."""
    for step in steps:
        last = checkpoints.save(folder, step, {"lr": 0.1}, *made())
    return last


def test_what_was_saved_is_restored(tmp_path):
    last = saved(tmp_path, 3)
    model, optimizer = made(1)
    assert checkpoints.restore(last, model, optimizer) == 3
    expected, expected_optimizer = made()
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
    last = saved(tmp_path, 8, 9, 10, 100000000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-100000000"]
    assert checkpoints.latest(tmp_path) == last


@pytest.mark.parametrize("function", ["rename", "fsync"])
def test_an_interrupted_save_leaves_what_was_there(tmp_path, monkeypatch, function):
    before = saved(tmp_path, 1, 2)

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, function, fail)
        saved(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
    assert checkpoints.latest(tmp_path) == before and checkpoints.restore(before, *made(1)) == 2


def test_a_killed_save_is_not_taken_for_a_checkpoint(tmp_path):
    last = saved(tmp_path, 1)
    shutil.copytree(last, tmp_path / ".step-00000002.1234")
    (tmp_path / ".step-00000002.1234" / "state.json").unlink()
    assert checkpoints.latest(tmp_path) == last


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "other"])
def test_a_damaged_checkpoint_is_refused_by_file(tmp_path, file, damage):
    path = saved(tmp_path / "run", 1) / file
    content = path.read_bytes()
    path.unlink()
    if damage in ("empty", "cut"):
        path.write_bytes(content[: len(content) // 2 if damage == "cut" else 0])
    elif damage == "other":
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        other = checkpoints.save(tmp_path / "other", 1, {}, model, optimizer)
        path.write_bytes(b"[1]" if file == "state.json" else (other / file).read_bytes())
    with pytest.raises(ValueError, match=rf"{file}: cannot be read \(.+\); remove .*step-00000001 to go on") as error:
        checkpoints.restore(path.parent, *made(1))
    assert "\n" not in str(error.value)
