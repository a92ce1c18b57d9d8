"""Checkpoints of a training run: folders that are whole or not there, of which the last two are kept.

One holds the weights and the optimizer's state as safetensors, which run nothing when they are read, state.json, and a checksum
of each of them in SHA256SUMS, as `sha256sum -c` takes it. Nothing is written that is not finite.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ssd.files import flush
from ssd.modules.checkpoint import listed, safetensors_package

from .parallel import cut_like, whole
from .terminal import first_line

_MODEL, _OPTIMIZER, _STATE = "model.safetensors", "optimizer.safetensors", "state.json"
_SUMS = "SHA256SUMS"
_FILES = (_MODEL, _OPTIMIZER, _STATE)
_KEPT = 2
_PART = 1 << 20  # bytes of a file that are in memory at a time


class NotFinite(ValueError):
    """Of weights or the optimizer's state, which so were not written; the message names them."""


class Damaged(ValueError):
    """A checkpoint that cannot be read; `what` names the file and the reason, the message says what to do as well."""

    def __init__(self, path: Path, reason: Exception):
        self.what = f"{path}: cannot be read ({first_line(reason)})"
        super().__init__(f"{self.what}; remove the folder {path.parent} to go on from the checkpoint before it")


def save(folder: Path, step: int, run: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    """Writes <folder>/step-<step>; before it is whole it has another name. Then older ones go, all but the last two.

    Of several processes all call it, for each may hold a part, and the first writes.

    Raises:
        NotFinite: a weight or a number of the optimizer's is not; earlier checkpoints are as they were.
        OSError: what the file system says; likewise.
    """
    final = folder / f"step-{step:08d}"
    (weights, odd), (moments, more) = map(_gathered, (_model_tensors(model), _optimizer_tensors(model, optimizer)))
    if odd or more:
        raise NotFinite(listed({*odd} or {*more}))  # the optimizer's are so as well, where a weight is
    if _is_first():
        _write(final, step, run, weights, moments, optimizer)
    if dist.is_initialized():
        dist.barrier()  # who has nothing to write must not end before it is written: torchrun would end them all
    return final


def _write(final: Path, step: int, run: Mapping[str, Any], weights: dict[str, Tensor], moments: dict[str, Tensor],
           optimizer: torch.optim.Optimizer) -> None:
    package, folder = safetensors_package(), final.parent
    part = folder / f".{final.name}.{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".step-*"):  # by a process that was killed
        shutil.rmtree(left)
    try:
        part.mkdir()
        package.torch.save_file(weights, part / _MODEL)
        package.torch.save_file(moments, part / _OPTIMIZER)
        state = {"step": step, "run": dict(run), "groups": _group_numbers(optimizer), "checksums": True}
        (part / _STATE).write_text(json.dumps(state, indent=2) + "\n")
        (part / _SUMS).write_text("".join(f"{_checksum(part / name)}  {name}\n" for name in _FILES))
        for path in (*part.iterdir(), part):
            flush(path)
        shutil.rmtree(final, ignore_errors=True)  # one that was damaged, so that its steps were taken again
        os.rename(part, final)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    flush(folder)
    for old in [path for path in _whole(folder) if path <= final][:-_KEPT]:  # a later one is damaged
        shutil.rmtree(old)


def latest(folder: Path) -> Path | None:
    """The checkpoint of the last step, if there is any."""
    return max(_whole(folder), default=None)


def latest_good(folder: Path) -> tuple[Path | None, list[Damaged]]:
    """The checkpoint of the last step whose checkpoint is as it was written, and what is wrong with those after it."""
    damaged = []
    for checkpoint in reversed(_whole(folder)):
        try:
            verify(checkpoint)
        except Damaged as reason:
            damaged.append(reason)
        else:
            return checkpoint, damaged
    return None, damaged


def verify(checkpoint: Path) -> None:
    """Raises:
        Damaged: a file is missing or not as its checksum has it; in a checkpoint of a time without checksums, one cannot be
            read or holds numbers that are not finite.
    """
    state, path = read_state(checkpoint), checkpoint / _SUMS
    try:
        if not (state.get("checksums") or path.exists()):
            for path in (checkpoint / _MODEL, checkpoint / _OPTIMIZER):
                if odd := _not_finite(safetensors_package().torch.load_file(path)):
                    raise ValueError(f"not finite: {listed({*odd})}")
            return
        sums = path.read_text()
        for path in map(checkpoint.joinpath, _FILES):
            if f"{_checksum(path)}  {path.name}\n" not in sums:
                raise ValueError(f"its checksum is not the one in {_SUMS}")
    except (OSError, ValueError, safetensors_package().SafetensorError) as reason:
        raise Damaged(path, reason) from reason


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Raises:
        Damaged: state.json is missing or damaged; the message says what to do.
    """
    path = checkpoint / _STATE
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as reason:
        raise Damaged(path, reason) from reason
    kinds = {"step": int, "run": dict, "groups": list}
    if not isinstance(state, dict) or not all(isinstance(state.get(key), kind) for key, kind in kinds.items()):
        raise Damaged(path, ValueError(f"it lacks one of {', '.join(kinds)}"))
    return state


def restore(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads what `save` wrote into a model and an optimizer made alike; returns its step.

    Raises:
        Damaged: a file is missing, cannot be read or is another model's; the message says what to do. Numbers that changed in
            it are found by `verify`.
    """
    package = safetensors_package()
    failures = (OSError, RuntimeError, KeyError, ValueError, package.SafetensorError)
    saved = read_state(checkpoint)
    parameters = dict(model.named_parameters())
    number = {name: n for n, name in enumerate(_names(model, optimizer))}
    try:
        state = {n: {} for n in range(len(parameters))}
        for key, t in package.torch.load_file(checkpoint / _OPTIMIZER).items():
            name, _, quantity = key.rpartition("/")
            if t.dim() and t.shape != parameters[name].shape:
                raise ValueError(f"{key}: got shape {tuple(t.shape)}, expected {tuple(parameters[name].shape)}")
            state[number[name]][quantity] = cut_like(t, parameters[name]) if t.dim() else t
        groups = [group | numbers
                  for group, numbers in zip(optimizer.state_dict()["param_groups"], saved["groups"], strict=True)]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except torch.OutOfMemoryError:  # a RuntimeError, but no fault of the file's
        raise
    except failures as reason:
        raise Damaged(checkpoint / _OPTIMIZER, reason) from reason
    try:
        weights, own = package.torch.load_file(checkpoint / _MODEL), _model_tensors(model)
        if differing := weights.keys() ^ own.keys():
            raise KeyError(f"another model's: it differs in {listed(differing)}")
        model.load_state_dict({name: cut_like(t, own[name]) for name, t in weights.items()}, strict=False)
    except torch.OutOfMemoryError:
        raise
    except failures as reason:
        raise Damaged(checkpoint / _MODEL, reason) from reason
    return saved["step"]


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _gathered(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Whole, in the first process's main memory, and in no other's; one at a time is on a GPU. In every process the names of
    those with numbers that are not finite.
    """
    found, odd = {}, []
    for name, t in tensors.items():
        t = whole(t)
        odd += _not_finite({name: t})
        if _is_first():
            found[name] = t.contiguous().cpu()
    return found, odd


def _not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    return [name for name, t in tensors.items() if not t.isfinite().all()]


def _checksum(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_PART):
            found.update(part)
    return found.hexdigest()


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Its state by name, of names for one tensor the first."""
    names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return {name: t for name, t in model.state_dict().items() if name in names}


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    states = optimizer.state_dict()["state"]
    return {f"{name}/{quantity}": t
            for n, name in enumerate(_names(model, optimizer)) for quantity, t in states.get(n, {}).items()}


def _group_numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, float]]:
    """What is a number in each group; timm's LAMB has its step there, in a tensor."""
    return [{name: value.item() if isinstance(value, Tensor) else value
             for name, value in group.items() if isinstance(value, (int, float, Tensor))} for group in optimizer.param_groups]


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The parameters' names in the order in which the optimizer numbers them."""
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    return [name_of[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def _whole(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"))

