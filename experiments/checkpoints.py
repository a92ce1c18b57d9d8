"""Checkpoints of a training run: folders that are whole or absent, of which the last two are kept.

`torch.distributed.checkpoint` writes weights and the optimizer's state, each process its own shards, as safetensors: reading
them runs no code, and another number of processes can read them. Beside them are state.json, and a checksum of every file in
SHA256SUMS, as `sha256sum -c` reads it. Tensors that are not finite are not written.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from ssd.files import flush
from ssd.modules.checkpoint import import_safetensors, list_few

from .shards import get_shard
from .terminal import first_line

_STATE, _SUMS = "state.json", "SHA256SUMS"
_KEPT = 2
_BLOCK = 1 << 20  # bytes of a file that are in memory at a time


class NotFinite(ValueError):
    """Weights or the optimizer's state are not finite and so were not written; the message names the tensors."""


class Damaged(ValueError):
    """A checkpoint that cannot be read. `what` names the file and the reason; the message also says what to do."""

    def __init__(self, path: Path, reason: BaseException):
        self.what = f"{path}: cannot be read ({first_line(reason)})"
        super().__init__(f"{self.what}; remove the folder {path.parent} to go on from the checkpoint before it")


def save(folder: Path, step: int, run: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer,
         samples: int | None = None) -> Path:
    """Writes <folder>/step-<step>, under another name until it is whole, then removes all but the last two checkpoints.

    run: its settings; samples: that its data have.

    Every process of a training calls it. The first one makes the folder and gives it its name.

    Raises:
        NotFinite: a weight or a number of the optimizer is not finite; earlier checkpoints are as they were.
        OSError: from the file system; earlier checkpoints are as they were.
    """
    final, part = folder / f"step-{step:08d}", folder / f".step-{step:08d}"
    weights, moments = _model_tensors(model), _optimizer_tensors(model, optimizer)
    if odd := _find_odd(weights) or _find_odd(moments):  # moments are odd as well where a weight is
        raise NotFinite(list_few({*odd}))
    import_safetensors()
    if _is_first():
        for left in folder.glob(".step-*"):  # by a process that was killed
            shutil.rmtree(left)
        part.mkdir(parents=True)
    _wait()
    try:
        with _plain_errors():
            dcp.save(weights | moments, storage_writer=dcp.HuggingFaceStorageWriter(str(part), save_distributed=True),
                     no_dist=not dist.is_initialized())
        if _is_first():
            state = {"step": step, "run": dict(run), "samples": samples, "groups": _group_numbers(optimizer)}
            (part / _STATE).write_text(json.dumps(state, indent=2) + "\n")
            (part / _SUMS).write_text("".join(f"{_checksum(path)}  {path.name}\n" for path in sorted(part.iterdir())))
            for path in (*part.iterdir(), part):
                flush(path)
            shutil.rmtree(final, ignore_errors=True)  # a damaged one, whose steps were taken again
            os.rename(part, final)
    finally:
        if _is_first():
            shutil.rmtree(part, ignore_errors=True)
    if _is_first():
        flush(folder)
        for old in [path for path in _list_all(folder) if path <= final][:-_KEPT]:  # a later one is damaged
            shutil.rmtree(old)
    _wait()  # a process that ends earlier would make torchrun end the first one
    return final


def latest(folder: Path) -> Path | None:
    """The checkpoint of the last step; None where there is none."""
    return max(_list_all(folder), default=None)


def latest_good(folder: Path) -> tuple[Path | None, list[Damaged]]:
    """The last checkpoint that `verify` accepts, and what is wrong with those after it."""
    damaged = []
    for checkpoint in reversed(_list_all(folder)):
        try:
            verify(checkpoint)
        except Damaged as reason:
            damaged.append(reason)
        else:
            return checkpoint, damaged
    return None, damaged


def verify(checkpoint: Path) -> None:
    """Raises:
        Damaged: a file is missing, or its checksum is not the one in SHA256SUMS.
    """
    path = checkpoint / _SUMS
    try:
        *lines, end = path.read_text().split("\n")
        found = [re.fullmatch(r"([0-9a-f]{64})  ([\w.-]+)", line) for line in lines]
        if end or None in found or len(found) < 2 or found[-1][2] != _STATE:
            raise ValueError("a line is cut or missing")
        sums = {match[2]: match[1] for match in found}
        for path in [checkpoint / name for name in sums]:
            if _checksum(path) != sums[path.name]:
                raise ValueError(f"its checksum is not the one in {_SUMS}")
    except (OSError, ValueError) as reason:
        raise Damaged(path, reason) from reason


def read_state(checkpoint: Path) -> dict[str, Any]:
    """state.json: step, run (the settings), samples and groups (numbers of the optimizer's parameter groups).

    Raises:
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


def read_tensors(checkpoint: Path, like: Callable[[str, torch.Size, torch.dtype], Tensor] | None = None) -> dict[str, Tensor]:
    """Weights by name and moments by "name/quantity", whole and on the CPU unless `like` makes the tensors to read into.

    Raises:
        Damaged: a file is missing or cannot be read.
    """
    make = like or (lambda _, size, dtype: torch.empty(size, dtype=dtype))
    try:
        with _plain_errors():
            reader = dcp.HuggingFaceStorageReader(str(checkpoint))
            saved = reader.read_metadata().state_dict_metadata
            if not saved:
                raise FileNotFoundError("no file of tensors in it")
            tensors = {name: make(name, t.size, t.properties.dtype) for name, t in saved.items()}
            dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(checkpoint)), no_dist=not dist.is_initialized())
        return tensors
    except (torch.OutOfMemoryError, Damaged):  # the first is a RuntimeError, but no fault of the file
        raise
    except (OSError, RuntimeError, KeyError, ValueError, AssertionError, import_safetensors().SafetensorError) as reason:
        verify(checkpoint)  # names the file
        raise Damaged(checkpoint / _SUMS, reason) from reason


def restore(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads what `save` wrote into a model and an optimizer of the same kind; returns its step.

    Raises:
        Damaged: a file is missing, cannot be read or is another model's. Only `verify` finds numbers that changed.
    """
    state, own = read_state(checkpoint), _model_tensors(model)
    parameters = dict(model.named_parameters())

    def like(name: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """Moments have their parameter's sharding; steps are single numbers."""
        target = own[name] if name in own else parameters.get(name.rpartition("/")[0])
        if target is None or (size and target.shape != size):
            raise KeyError(f"another model's: got {name} of shape {tuple(size)}")
        return torch.zeros_like(target, dtype=dtype) if size else torch.zeros(size, dtype=dtype)

    tensors = read_tensors(checkpoint, like)
    if missing := own.keys() - tensors.keys():
        raise Damaged(checkpoint / _SUMS, KeyError(f"another model's: it lacks {list_few(missing)}"))
    number = {name: n for n, name in enumerate(_names(model, optimizer))}
    moments: dict[int, dict[str, Tensor]] = {n: {} for n in range(len(number))}
    for key in tensors.keys() - own.keys():
        name, _, quantity = key.rpartition("/")
        moments[number[name]][quantity] = tensors[key]
    groups = [_set_numbers(group, numbers)
              for group, numbers in zip(optimizer.state_dict()["param_groups"], state["groups"], strict=True)]
    optimizer.load_state_dict({"state": moments, "param_groups": groups})
    model.load_state_dict({name: tensors[name] for name in own}, strict=False)
    return state["step"]


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raises what went wrong in a process itself, where torch raises a BaseException that holds it."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as reason:
        raise next(iter(reason.failures.values()))[0] from reason


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _wait() -> None:
    if dist.is_initialized():
        dist.barrier()


def _find_odd(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors that are not finite in any process; all processes have to ask."""
    own = [name for name, t in tensors.items() if not get_shard(t).isfinite().all()]
    if not dist.is_initialized():
        return own
    every: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return [name for names in every for name in names]


def _checksum(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found.update(block)
    return found.hexdigest()


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's state by name; a tensor with several names has its first."""
    names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return {name: t for name, t in model.state_dict().items() if name in names}


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    states = optimizer.state_dict()["state"]
    return {f"{name}/{quantity}": t
            for n, name in enumerate(_names(model, optimizer)) for quantity, t in states.get(n, {}).items()}


def _group_numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, float]]:
    """The numbers of each parameter group; LAMB keeps its step there, in a tensor."""
    return [{name: value.item() if isinstance(value, Tensor) else value
             for name, value in group.items() if isinstance(value, (int, float, Tensor))} for group in optimizer.param_groups]


def _set_numbers(group: dict[str, Any], numbers: Mapping[str, float]) -> dict[str, Any]:
    """The group with numbers of `_group_numbers`, in tensors where it has such; switches, capturable say, stay its own."""
    own = {name: value for name, value in numbers.items() if not isinstance(value, bool)}
    return group | {name: torch.full_like(group[name], value) if isinstance(group.get(name), Tensor) else value
                    for name, value in own.items()}


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The parameters' names in the order in which the optimizer numbers them."""
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    return [name_of[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def _list_all(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name) and path.is_dir())
