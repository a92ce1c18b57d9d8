"""Which states or heads are kept, and a model without the others: smaller parameters, for the same kernels.

What is removed counts as zero: but for rounding the smaller model computes what the whole one would with those channels zeroed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .blocks import Block, find_blocks, find_norm_eps, find_tensor, group_rows

_NAMES = {  # what blocks call their sizes, ours and others'
    "dstate": ("d_state", "ssm_state_size"), "nheads": ("nheads", "num_heads"), "dim": ("d_ssm",),
    "inner": ("d_inner", "intermediate_size"), "convolved": ("conv_dim",), "grouped": ("groups_time_state_size",),
}


@dataclass(frozen=True)
class Kept:
    """heads: (heads,) int64, rising; states: (ngroups, states) int64, each row rising. On the CPU."""

    heads: Tensor
    states: Tensor


def prune(model: nn.Module, scores: Mapping[str, Tensor], kind: str, ratio: float) -> dict[str, Kept]:
    """Removes that part of each block's states or heads which scores lowest; the model given is changed.

    Args:
        model: with Mamba blocks, ours or of mamba_ssm or transformers, whose config then says the new sizes as well.
        scores: by block, (ngroups, dstate) of states or (nheads,) of heads; see `score`.
        kind: "states" or "heads".
        ratio: of what is removed, the same in every group of every block.

    Returns:
        What each block kept.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is accepted; nothing was changed.
    """
    blocks = find_blocks(model, kind)
    kept = choose(blocks, scores, kind, ratio)
    for name, block in blocks.items():
        cut(block, kept[name])
    tell_config(model)
    return kept


def choose(blocks: Mapping[str, Block], scores: Mapping[str, Tensor], kind: str, ratio: float) -> dict[str, Kept]:
    """The highest scores of each group, as many of each. Arguments and errors as of `prune`."""
    if not isinstance(scores, Mapping):
        raise TypeError(f"scores: got {type(scores).__name__}, expected a tensor for each block, by name")
    if missing := blocks.keys() - scores.keys():
        raise ValueError(f"scores: got none for {', '.join(sorted(missing))}, expected one tensor for each block")
    left = {name: _check_ratio(block, kind, ratio) for name, block in blocks.items()}
    kept = {}
    for name, block in blocks.items():
        shape = (block.ngroups, block.dstate) if kind == "states" else (block.nheads,)
        if not isinstance(scores[name], Tensor) or scores[name].is_complex():
            raise TypeError(f"scores: got {type(scores[name]).__name__} for {name}, expected a tensor of real numbers")
        if scores[name].shape != shape or not scores[name].isfinite().all():
            odd = " with infinite numbers or NaN" if scores[name].shape == shape else ""
            raise ValueError(f"scores: got {tuple(scores[name].shape)}{odd} for {name}, expected {shape}, finite")
        best = scores[name].detach().cpu().view(block.ngroups, -1).argsort(dim=1, descending=True, stable=True)[:, : left[name]]
        best = best.sort(1).values
        if kind == "states":
            kept[name] = Kept(torch.arange(block.nheads), best)
        else:
            first = torch.arange(block.ngroups)[:, None] * block.count(kind)
            kept[name] = Kept((first + best).flatten(), torch.arange(block.dstate).expand(block.ngroups, -1))
    return kept


@torch.no_grad()
def cut(block: Block, kept: Kept) -> None:
    """Leaves the block with the heads and states that are kept alone.

    The gated norm divides by the number of a group's channels. With fewer heads, its weight and eps are scaled, so that the
    removed channels still count as zeros in its mean.
    """
    module = block.module
    for (name, dim), parts in block.axes.items():
        old, start, rows = find_tensor(module, name), 0, []
        for part in parts:
            rows.append(start + group_rows(block, part, kept.heads, kept.states))
            start += block.size(part)
        rows = torch.cat(rows)
        if len(rows) < start:
            _put(module, name, old.index_select(dim, rows.to(old.device)))
    fewer = replace(block, nheads=len(kept.heads), dstate=kept.states.shape[1])
    share = fewer.nheads / block.nheads
    if share < 1 and (eps := find_norm_eps(module)):
        module.norm.weight *= share**-0.5
        setattr(module.norm, eps, getattr(module.norm, eps) / share)
        if size := getattr(module.norm, "group_size", None):  # of the norm, which need not be the SSD's
            module.norm.group_size = size * fewer.nheads // block.nheads
    _tell_sizes(fewer)


def list_ratios(block: Block, kind: str) -> list[float]:
    """The ratios that leave a number that the fast kernels take, and at least one."""
    count, unit = block.count(kind), block.unit(kind)
    return [1 - left / count for left in range(unit, count, unit)][::-1]


def _check_ratio(block: Block, kind: str, ratio: float) -> int:
    """How many of each group are left."""
    count, unit = block.count(kind), block.unit(kind)
    left = count * (1 - ratio) if isinstance(ratio, (int, float)) and 0 < ratio < 1 else 0
    if left >= 1 and abs(left - round(left)) < 1e-6 and round(left) % unit == 0:
        return round(left)
    good = ", ".join(f"{good:.6g}" for good in list_ratios(block, kind)) or "none, for there are too few"
    raise ValueError(f"ratio: got {ratio!r}, which leaves {left:.6g} of the {count} {kind} of a group in "
                     f"{block.name or 'the block'}, expected what leaves a multiple of {unit}, at least {unit}: {good}")


def _put(module: nn.Module, name: str, t: Tensor) -> None:
    """Replace a parameter, keeping its marks such as `_no_weight_decay`, or a buffer."""
    owner, _, last = name.rpartition(".")
    owner = module.get_submodule(owner)
    old = getattr(owner, last)
    if isinstance(old, nn.Parameter):
        t = nn.Parameter(t.contiguous(), old.requires_grad)
        vars(t).update(vars(old))
    setattr(owner, last, t)


def _tell_sizes(block: Block) -> None:
    """Update the sizes that modules keep beside their parameters."""
    module, dim, states = block.module, block.nheads * block.headdim, block.ngroups * block.dstate
    for linear in (child for child in module.children() if isinstance(child, nn.Linear)):
        linear.out_features, linear.in_features = linear.weight.shape
    if conv := getattr(module, "conv1d", None):
        conv.in_channels = conv.out_channels = conv.groups = conv.weight.shape[0]
    inner = module.out_proj.weight.shape[1] if block.has("heads") else dim
    values = {"dstate": block.dstate, "nheads": block.nheads, "dim": dim, "inner": inner, "convolved": dim + 2 * states,
              "grouped": states}
    for size, names in _NAMES.items():
        for name in names:
            if hasattr(module, name):
                setattr(module, name, values[size])
    for name in ("parts", "splits"):  # of x_proj in the runner's Mamba-1 blocks
        if hasattr(module, name):
            parts = getattr(module, name)
            setattr(module, name, type(parts)((parts[0], block.dstate, block.dstate)))


def tell_config(model: nn.Module) -> None:
    """The number of states to the config of a model of transformers, whose `from_pretrained` then reads what it saves.

    Not that of heads: most of its configs take a whole number of times as many channels inside as outside.
    """
    config = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return
    dstate = next(iter(find_blocks(model).values())).dstate
    for name in ("state_size", "mamba_d_state", "ssm_state_size"):
        if getattr(config, name, None) is not None:
            setattr(config, name, dstate)
