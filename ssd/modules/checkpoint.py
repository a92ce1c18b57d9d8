"""A checkpoint's folder: config.json, and weights as safetensors, whole or in shards, or as a pickle of tensors alone."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..block.arguments import DTYPES
from ..files import flush

_CONFIG = "config.json"
_WHOLE, _INDEX, _PICKLE = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
_NOT_IN_NAMES = frozenset("/\\\0")  # of files; Windows' separator as well, wherever the file was written
_REPLACING = Lock()  # held while the files of a checkpoint are not all of the same model


def take_folder(folder: object) -> Path:
    """Raises:
        TypeError: it is no path.
        ValueError: it is empty.
    """
    if not isinstance(folder, (str, PathLike)):
        raise TypeError(f"folder: got {folder!r}, expected a path")
    if not os.fspath(folder):
        raise ValueError(f"folder: got {folder!r}, expected a path that is not empty; '.' is the current folder")
    return Path(folder)


def read_config(folder: Path) -> dict[str, Any]:
    """Raises:
        FileNotFoundError: no such folder, or no config.json in it.
        ValueError: it is not a JSON object.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"folder: got {folder}, expected a folder that exists; a model of the Hugging Face Hub is "
                                "downloaded first: hf download OWNER/NAME --local-dir FOLDER")
    if not (folder / _CONFIG).is_file():
        raise FileNotFoundError(f"folder: got {folder}, expected a {_CONFIG} in it")
    return _read_json(folder / _CONFIG)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Tensors by name, on the CPU, from the first that is there: model.safetensors, its shards, pytorch_model.bin.

    Raises:
        FileNotFoundError: none of them is there, or a shard is missing.
        ValueError: naming the file: it is cut, empty or damaged, or not what its name says; shards do not agree with their
            index; a pickle holds more than tensors by name, in which case nothing of it was run.
        ImportError: the package safetensors is needed and missing.
    """
    for name, read in ((_WHOLE, _read_safetensors), (_INDEX, _read_shards), (_PICKLE, _read_pickle)):
        if (folder / name).is_file():
            return read(folder / name)
    raise FileNotFoundError(f"folder: got {folder}, expected weights in it: {_WHOLE}, {_INDEX} or {_PICKLE}")


def check_dtypes(weights: Mapping[str, Tensor]) -> None:
    """Raises:
        ValueError: a weight is of numbers that no model here computes with.
    """
    for name, t in weights.items():
        if t.dtype not in DTYPES:
            raise ValueError(f"{name}: got {t.dtype}, expected one of {', '.join(map(str, DTYPES))}")


def write(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """config.json and model.safetensors, replaced when both new ones are whole; the folder is made.

    Each has the mode of the file that it replaces, or that of an ordinary new file. After an error, the files are as before.

    Args:
        weights: contiguous, no two in the same memory.

    Raises:
        FileExistsError: the folder, or one above it, is a file.
        IsADirectoryError: one of the two files is a folder.
        TypeError: config has what JSON does not hold.
        ValueError: a weight is on the meta device.
    """
    save_file = import_safetensors().torch.save_file
    for name, t in weights.items():
        if t.is_meta:
            raise ValueError(f"{name}: got a tensor on the meta device, which has no numbers, expected one that has numbers")
    try:
        text = json.dumps(config, indent=2) + "\n"
    except (TypeError, ValueError) as error:
        raise TypeError(f"config: got what JSON does not hold ({error}), expected numbers, text, lists and dicts") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise FileExistsError(f"folder: got {folder}, which is or lies under a file, expected a folder or a path to make one "
                              "at") from error
    for name in (_CONFIG, _WHOLE):
        if (folder / name).is_dir():
            raise IsADirectoryError(f"folder: got {folder}, whose {name} is a folder, expected a file or nothing there")
    with TemporaryDirectory(prefix=".saving-", dir=folder, ignore_cleanup_errors=True) as made:
        parts = Path(made)
        (parts / _CONFIG).write_text(text)
        save_file(dict(weights), parts / _WHOLE, metadata={"format": "pt"})  # without which transformers does not read the file
        for name in (_WHOLE, _CONFIG):  # the config last: until then it has the mode of an ordinary new file
            flush(parts / name)
            shutil.copymode(folder / name if (folder / name).exists() else parts / _CONFIG, parts / name)
        with _REPLACING:
            _replace_both(folder, parts)


def _replace_both(folder: Path, parts: Path) -> None:
    """Moves the new files from parts to folder; unless the weights, which come last, were moved, puts the old config back."""
    config, old = folder / _CONFIG, parts / "old"
    if there := os.path.lexists(config):
        shutil.copy2(config, old, follow_symlinks=False)
    try:
        os.replace(parts / _CONFIG, config)
        os.replace(parts / _WHOLE, folder / _WHOLE)
    except BaseException:  # as of Ctrl-C, which may come behind a step that has ended well
        if (parts / _WHOLE).exists() and not (parts / _CONFIG).exists():
            if there:
                os.replace(old, config)
            else:
                config.unlink()
        raise


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: got {type(values).__name__}, expected an object with names")
    return values


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    return _read(path, import_safetensors().torch.load_file, "not safetensors", "the whole file as safetensors wrote it")


def _read_shards(index: Path) -> dict[str, Tensor]:
    shard_of = _read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of or not all(isinstance(shard, str) for shard in shard_of.values()):
        raise ValueError(f"{index}: got no weight_map, expected one, of the weights' names to their files' names")
    shards = sorted(set(shard_of.values()))
    for shard in shards:
        if shard in ("", ".", "..") or not _NOT_IN_NAMES.isdisjoint(shard):
            raise ValueError(f"{index}: got the file {shard!r}, expected names of files beside it")
    for shard in shards:
        if not index.with_name(shard).is_file():
            raise FileNotFoundError(f"{index}: got the file {shard!r}, expected it beside it, where there is none")
    weights, found = {}, set()
    for shard in shards:
        part = _read_safetensors(index.with_name(shard))
        weights |= part
        found |= {(name, shard) for name in part}
    if differing := found ^ shard_of.items():
        raise ValueError(f"{index}: disagrees with its files about {list_few({name for name, _ in differing})}")
    return weights


def _read_pickle(path: Path) -> dict[str, Tensor]:
    def load(path: Path) -> Any:
        return torch.load(path, map_location="cpu", weights_only=True)

    try:
        weights = _read(path, load, "torch cannot read it", "a state dict, the whole file as torch.save wrote it")
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path}: refused, for it holds more than tensors, or is damaged; expected a state dict") from error
    if not isinstance(weights, dict) or not all(isinstance(t, Tensor) for t in weights.values()):
        raise ValueError(f"{path}: got {type(weights).__name__} of more than tensors, expected a state dict")
    for name, t in weights.items():
        if not isinstance(name, str):
            raise ValueError(f"{path}: got a tensor under {name!r}, expected names")
        if t.layout != torch.strided or t.device.type != "cpu":
            raise ValueError(f"{path}: {name}: got a {t.layout} tensor on {t.device}, expected a dense one with its numbers")
    return weights


def _read(path: Path, load: Callable[[Path], Any], failure: str, expected: str) -> Any:
    """load(path), which says in many ways that a file is damaged: wherever its parser stumbles, by whatever that raises.

    failure, expected: for the message.
    """
    if not path.stat().st_size:
        raise ValueError(f"{path}: got an empty file, expected {expected}")
    try:
        return load(path)
    except (OSError, MemoryError, ImportError, pickle.UnpicklingError):  # of the machine, and of what the caller refuses
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{path}: {failure}: {type(error).__name__}: {reason}; it is cut or damaged, or of another format; "
                         f"expected {expected}") from error


def import_safetensors() -> ModuleType:
    """safetensors, or an ImportError that says what to install."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("safetensors is not installed, which reads and writes checkpoints: pip install safetensors",
                          name="safetensors") from error
    return safetensors


def list_few(names: set[str], most: int = 4) -> str:
    """A few names for a message."""
    return ", ".join(sorted(names)[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
