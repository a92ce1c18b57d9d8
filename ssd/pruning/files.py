"""Pruned models in folders: config.json, which says the sizes of each block under "pruning", and model.safetensors.

A whole model is built first, and shrunk to those sizes when it is loaded; so any model can be saved that has the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..block.gated_norm import check_eps
from ..modules import checkpoint
from ..modules.language_config import Mamba2LMConfig
from ..modules.language_model import Mamba2LM
from .blocks import describe, find_blocks, find_norm_eps
from .structure import Kept, cut, tell_config

RECORD = "pruning"  # its key in config.json
_TAKEN = (".json", ".safetensors", ".bin")  # files of a checkpoint
_SIZES = ("nheads", "headdim", "ngroups", "dstate")


def save(model: nn.Module, folder: str | PathLike[str], config: Mapping[str, Any], **how: Any) -> None:
    """Writes a pruned model into a folder of its own; what is there is never overwritten.

    Args:
        config: what the whole model is built of, as JSON; for a `Mamba2LM`, `dataclasses.asdict(model.config)`.
        how: the model was pruned, for the reader: kind, ratio, score.

    Raises:
        FileExistsError: the folder has a checkpoint in it.
        TypeError: folder is no path, or config has what JSON does not hold.
        ValueError: the model has no blocks, or a weight on the meta device; or folder is empty.
    """
    folder, record = checkpoint.take_folder(folder), {**how, "blocks": describe(model)}
    if taken := sorted(path.name for path in folder.glob("*") if path.suffix in _TAKEN):
        raise FileExistsError(f"folder: got {folder}, which has {', '.join(taken)} in it, expected another folder: no "
                              "checkpoint is overwritten")
    checkpoint.write(folder, {**config, RECORD: record}, {name: t.detach().contiguous() for name, t in _tensors(model).items()})


def is_pruned(folder: str | PathLike[str]) -> bool:
    """Whether its config.json says so. Raises as `ssd.modules.checkpoint.read_config`."""
    return RECORD in checkpoint.read_config(checkpoint.take_folder(folder))


def load(model: nn.Module, folder: str | PathLike[str]) -> dict[str, Any]:
    """Shrinks a whole model to the sizes of a pruned one's folder, and gives it that one's weights, in the model's dtypes.

    Returns:
        config.json.

    Raises:
        FileNotFoundError, ValueError, ImportError: naming the file, block or weight, what came and what is accepted; the model
            is as it was.
    """
    folder = checkpoint.take_folder(folder)
    config = checkpoint.read_config(folder)
    sizes = _read_record(folder, config)
    blocks = find_blocks(model)
    if sizes.keys() != blocks.keys():
        raise ValueError(f"folder: got {folder}, with the blocks {checkpoint.list_few({*sizes})}, expected those of the model, "
                         f"{checkpoint.list_few({*blocks})}")
    for name, block in blocks.items():
        whole, saved = block.sizes(), sizes[name]
        if any(whole[size] != saved[size] for size in ("headdim", "ngroups")) or any(
                whole[size] < saved[size] for size in ("nheads", "dstate")) or saved["nheads"] % saved["ngroups"]:
            raise ValueError(f"{name}: got {_say(saved)} in {folder}, expected at most those of the model, {_say(whole)}")
        if "norm_eps" in saved:
            check_eps(f"{name}: norm_eps", saved["norm_eps"])
    weights = checkpoint.read_weights(folder)
    own = _tensors(model)
    if differing := own.keys() ^ weights.keys():
        raise ValueError(f"{folder}: disagrees with the model about {checkpoint.list_few({*differing})}")
    checkpoint.check_dtypes({name: t for name, t in weights.items() if own[name].is_floating_point()})
    expected = _find_shapes(model, sizes)
    for name, t in weights.items():
        if t.shape != expected[name]:
            raise ValueError(f"{name}: got shape {tuple(t.shape)} in {folder}, expected {tuple(expected[name])}")
    _shrink(model, sizes)
    with torch.no_grad():
        for name, own in _tensors(model).items():
            own.copy_(weights[name])
    return config


def load_language_model(folder: str | PathLike[str], dtype: torch.dtype | None = None, device=None,
                        variant: str = "auto") -> Mamba2LM:
    """The pruned `Mamba2LM` of a folder that `save` wrote; dtype, device and variant as of `Mamba2LM`. Raises as `load`."""
    folder = checkpoint.take_folder(folder)
    config = checkpoint.read_config(folder)
    _read_record(folder, config)
    whole = Mamba2LMConfig.from_dict({name: value for name, value in config.items() if name != RECORD})
    model = Mamba2LM(whole, device=device, dtype=dtype, variant=variant)
    load(model, folder)
    return model


def _read_record(folder: Path, config: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The sizes of each block."""
    if RECORD not in config:
        raise ValueError(f"folder: got {folder}, a checkpoint that was not pruned, expected one that ssd.pruning.save wrote")
    record = config[RECORD]
    sizes = record.get("blocks") if isinstance(record, dict) else None
    if not isinstance(sizes, dict) or not all(
            isinstance(one, dict) and all(isinstance(one.get(size), int) and one[size] > 0 for size in _SIZES)
            for one in sizes.values()):
        raise ValueError(f"{folder / 'config.json'}: {RECORD}: got no sizes of blocks, expected {', '.join(_SIZES)} of each")
    return sizes


def _shrink(model: nn.Module, sizes: Mapping[str, Mapping[str, float]]) -> None:
    """The first heads and states stay; which they are does not matter to weights that are about to be replaced."""
    for name, block in find_blocks(model).items():
        saved = sizes[name]
        each = torch.arange(saved["nheads"] // block.ngroups)
        first = torch.arange(block.ngroups)[:, None] * block.count("heads")
        cut(block, Kept((first + each).flatten(), torch.arange(saved["dstate"]).expand(block.ngroups, -1)))
        if (eps := find_norm_eps(block.module)) and "norm_eps" in saved:
            setattr(block.module.norm, eps, saved["norm_eps"])
    tell_config(model)


def _find_shapes(model: nn.Module, sizes: Mapping[str, Mapping[str, float]]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of the shrunk model."""
    shapes = {name: list(t.shape) for name, t in _tensors(model).items()}
    for name, block in find_blocks(model).items():
        smaller = replace(block, **{size: sizes[name][size] for size in ("nheads", "dstate")})
        for (parameter, dim), parts in block.axes.items():
            if (full := f"{name}.{parameter}") in shapes:
                shapes[full][dim] = sum(map(smaller.size, parts))
    return {name: tuple(shape) for name, shape in shapes.items()}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """What is saved, by name; a tensor with several names has its first."""
    first = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return {name: t for name, t in model.state_dict().items() if name in first}


def _say(sizes: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {sizes[name]}" for name in _SIZES)
