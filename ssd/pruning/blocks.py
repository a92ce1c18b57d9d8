"""Where heads and states lie in the parameters of a Mamba block, whoever wrote it: ours, mamba_ssm's or transformers'.

A block is found by its parameters' names, which all of them share, and measured by their shapes. A Mamba-1 block is read as one
group of heads of one channel each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

KINDS = ("states", "heads")  # what can be removed


@dataclass(frozen=True)
class Part:
    """Consecutive rows of a parameter.

    Attributes:
        label: z, x, B, C, dt, or rest, which stays whatever is removed.
        of: heads, states or rest: whose rows they are.
        width: rows of each head, 1 of each state; of the rest, all of them.
    """

    label: str
    of: str
    width: int = 1


@dataclass(frozen=True)
class Block:
    """Attributes:
        name: in the model.
        module: with the parameters.
        ssd: a Mamba-2 block; else Mamba-1.
        nheads, headdim, ngroups, dstate: as of `ssd.ssd_chunk_scan`; B and C have ngroups * dstate rows.
        axes: by a parameter's name and one of its dimensions the parts that follow one another there.
    """

    name: str
    module: nn.Module
    ssd: bool
    nheads: int
    headdim: int
    ngroups: int
    dstate: int
    axes: Mapping[tuple[str, int], tuple[Part, ...]]

    def count(self, kind: str) -> int:
        """Of a group: its states, or its heads."""
        return self.dstate if kind == "states" else self.nheads // self.ngroups

    def unit(self, kind: str) -> int:
        """What the number of states or heads that is left must be a multiple of, for the fast kernels."""
        if self.ssd:
            return 16 if kind == "states" else 1
        return 4 if kind == "states" else 16  # Mamba-1 has 8 or 16 states, and a head is a channel

    def has(self, kind: str) -> bool:
        """Whether they can be removed: heads only where the block makes and takes up its own channels."""
        return kind == "states" or ("out_proj.weight", 1) in self.axes

    def size(self, part: Part) -> int:
        return {"heads": self.nheads, "states": self.ngroups * self.dstate, "rest": 1}[part.of] * part.width

    def split(self, t: Tensor, parameter: str, axis: int = 0, dim: int = -1) -> dict[str, Tensor]:
        """The parts, by label, of a tensor that is along `dim` as the parameter is along `axis`."""
        parts = self.axes[parameter, axis]
        return dict(zip((part.label for part in parts), t.split([self.size(part) for part in parts], dim), strict=True))

    def parameter(self, name: str) -> Tensor:
        return self.module.get_parameter(name)

    def sizes(self) -> dict[str, int]:
        return {"nheads": self.nheads, "headdim": self.headdim, "ngroups": self.ngroups, "dstate": self.dstate}


def find_blocks(model: nn.Module, kind: str = "states") -> dict[str, Block]:
    """The Mamba blocks of a model that have what is to be removed, by name.

    Raises:
        ValueError: no such kind, no such block, or one whose parameters have other sizes than such blocks have.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: got {kind!r}, expected one of {', '.join(KINDS)}")
    found = {name: block for name, module in model.named_modules() if (block := _describe(name, module)) and block.has(kind)}
    if not found:
        raise ValueError(f"model: got {type(model).__name__} without {kind} to remove, expected Mamba-2 blocks (in_proj, "
                         "conv1d, dt_bias, A_log, D, out_proj) or Mamba-1 blocks (x_proj, dt_proj, A_log, D)")
    for block in found.values():
        for (parameter, dim), parts in block.axes.items():
            shape, expected = tuple(find_tensor(block.module, parameter).shape), sum(map(block.size, parts))
            if shape[dim] != expected:
                raise ValueError(f"model: got {block.name}.{parameter} of shape {shape}, expected {expected} along axis {dim}")
    return found


def find_tensor(module: nn.Module, name: str) -> Tensor:
    """A parameter or buffer."""
    owner, _, last = name.rpartition(".")
    return getattr(module.get_submodule(owner), last)


def _describe(name: str, module: nn.Module) -> Block | None:
    A_log = getattr(module, "A_log", None)
    if not isinstance(A_log, Tensor):
        return None
    if A_log.dim() == 1 and _has_linears(module, "in_proj", "out_proj") and hasattr(module, "dt_bias"):
        return _describe_ssd(name, module)
    if A_log.dim() == 2 and _has_linears(module, "x_proj", "dt_proj") and not hasattr(module, "b_layernorm"):
        return _describe_scan(name, module)
    return None


def _has_linears(module: nn.Module, *names: str) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Linear) for name in names)


def _describe_ssd(name: str, module: nn.Module) -> Block:
    """in_proj makes [rest | z | x | B | C | dt]; where a block has an MLP beside it, its channels are the rest."""
    nheads, headdim = module.A_log.shape[0], _read(module, "headdim", "head_dim")
    ngroups, convolved = _read(module, "ngroups", "n_groups"), module.conv1d.weight.shape[0]
    dstate = (convolved - nheads * headdim) // (2 * ngroups)
    beside = module.out_proj.weight.shape[1] - nheads * headdim
    channels, states = (lambda label: Part(label, "heads", headdim)), (lambda label: Part(label, "states"))
    xBC = (channels("x"), states("B"), states("C"))
    projected = (Part("rest", "rest", 2 * beside), channels("z"), *xBC, Part("dt", "heads"))
    axes = {("in_proj.weight", 0): projected, ("in_proj.bias", 0): projected, ("mup_vector", 2): projected,
            ("conv1d.weight", 0): xBC, ("conv1d.bias", 0): xBC,
            ("A_log", 0): (Part("A", "heads"),), ("dt_bias", 0): (Part("dt", "heads"),),
            ("D", 0): (Part("D", "heads", module.D.shape[0] // nheads),), ("norm.weight", 0): (channels("x"),),
            ("out_proj.weight", 1): (Part("rest", "rest", beside), channels("x"))}
    return Block(name, module, True, nheads, headdim, ngroups, dstate, _keep_present(module, axes))


def _describe_scan(name: str, module: nn.Module) -> Block:
    """x_proj makes [rest | B | C] of x; the rest is what dt_proj makes the steps of. in_proj, where there is one, [x | z]."""
    channels, dstate = module.A_log.shape
    rank = module.dt_proj.weight.shape[1]
    x, z = Part("x", "heads"), Part("z", "heads")
    axes = {("in_proj.weight", 0): (x, z), ("in_proj.bias", 0): (x, z), ("conv1d.weight", 0): (x,), ("conv1d.bias", 0): (x,),
            ("x_proj.weight", 0): (Part("rest", "rest", rank), Part("B", "states"), Part("C", "states")),
            ("x_proj.weight", 1): (x,), ("dt_proj.weight", 0): (x,), ("dt_proj.bias", 0): (x,), ("A_log", 0): (x,),
            ("A_log", 1): (Part("A", "states"),), ("D", 0): (x,), ("out_proj.weight", 1): (x,)}
    return Block(name, module, False, channels, 1, 1, dstate, _keep_present(module, axes))


def _keep_present(module: nn.Module, axes: dict[tuple[str, int], tuple[Part, ...]]) -> dict[tuple[str, int], tuple[Part, ...]]:
    present = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    return {axis: parts for axis, parts in axes.items() if axis[0] in present}


def _read(module: nn.Module, *names: str) -> int:
    return next(getattr(module, name) for name in names if hasattr(module, name))


def find_norm_eps(module: nn.Module) -> str | None:
    """What the block's norm calls the number that it adds to the mean square; None without a norm."""
    norm = getattr(module, "norm", None)
    return next((name for name in ("eps", "variance_epsilon") if hasattr(norm, name)), None)


def describe(model: nn.Module) -> dict[str, dict[str, float]]:
    """Of every block that can be pruned at all: its sizes, and eps of its norm; numbers that a checkpoint's config keeps."""
    rows = {}
    for name, block in find_blocks(model).items():
        eps = find_norm_eps(block.module)
        rows[name] = block.sizes() | ({"norm_eps": getattr(block.module.norm, eps)} if eps else {})
    return rows


def group_rows(block: Block, part: Part, heads: Tensor, states: Tensor) -> Tensor:
    """Which rows of a part are those of the given heads, (n,), and of the given states of each group, (ngroups, n)."""
    match part.of:
        case "heads":
            return (heads[:, None] * part.width + torch.arange(part.width)).flatten()
        case "states":
            return (torch.arange(block.ngroups)[:, None] * block.dstate + states).flatten()
    return torch.arange(part.width)
