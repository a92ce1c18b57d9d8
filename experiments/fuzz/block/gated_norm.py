"""`rms_norm_gated` as a configuration."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import torch
from torch import Tensor

from ssd.block import rms_norm_gated
from ssd.block.gated_norm import compute_in_torch

from ..common import Common, Values, draw_call, draw_dtypes, draw_layouts, draw_sizes, make_problem
from ..limits import Limits, draw_size
from ..problem import Problem, Tensors

DIFFERENTIABLE = ("x", "weight", "bias", "z")
_AXES = {"out": "blc", "dx": "blc", "dz": "blc", "dweight": "h", "dbias": "h"}


@dataclass(frozen=True)
class Config(Common):
    """before: the norm is before the gate."""

    seqlen: int = 1
    groups: int = 1
    group_size: int = 1
    bias: bool = False
    z: bool = False
    before: bool = True
    eps_added: float = 1e-5


def draw_shared(rng: Random, limits: Limits) -> Config:
    """What the kernels are compiled for."""
    return Config(
        dtype=rng.choice(limits.dtypes), dtypes=draw_dtypes(rng, limits, DIFFERENTIABLE[1:]),
        layouts=draw_layouts(rng, (*DIFFERENTIABLE, "dout")), groups=draw_size(rng, 8),
        group_size=draw_size(rng, 8 * limits.channels, (64, 256, 1024)), bias=rng.random() < 0.4, z=rng.random() < 0.7,
        before=rng.random() < 0.5, eps_added=rng.choice((1e-6, 1e-5, 0.02)))


def draw_member(rng: Random, c: Config, limits: Limits) -> Config:
    width = c.groups * c.group_size
    sizes = draw_sizes(rng, limits, draw_size(rng, limits.seqlen), 2 * width)
    names = tuple(name for name in DIFFERENTIABLE if name in ("x", "weight") or getattr(c, name))
    return replace(c, **sizes, **draw_call(rng, limits, names))


def problem(c: Config, turn: int, device: str) -> Problem:
    values, width = Values(c, turn, device), c.groups * c.group_size
    tensors = values.finish({
        "x": values.normal(c.batch, c.seqlen, width), "weight": values.normal(width),
        "bias": values.normal(width) if c.bias else None,
        "z": values.normal(c.batch, c.seqlen, width) if c.z else None}, ("weight", "bias"))
    return make_problem(c, tensors, partial(_call, rms_norm_gated), partial(_call, define), _mirror, _AXES,
                        summed=("dweight", "dbias"), tokens=c.batch * c.seqlen)


def _call(function: Callable, c: Config, tensors: Tensors) -> dict[str, Tensor]:
    return {"out": function(**tensors, eps=c.eps_added, group_size=c.group_size, norm_before_gate=c.before)}


def _mirror(c: Config, t: Tensors) -> dict[str, Tensor]:
    return {"out": compute_in_torch(t["x"], t["weight"], t["bias"], t["z"], c.eps_added, c.group_size, c.before)}


def define(x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor | None, eps: float, group_size: int | None,
           norm_before_gate: bool) -> Tensor:
    """`rms_norm_gated` by (N1) to (N4) in fp64, a group at a time."""
    x, weight, bias, z = (None if t is None else t.double() for t in (x, weight, bias, z))
    gate = torch.ones_like(x) if z is None else z / (1 + torch.exp(-z))
    normed = [v / (v.pow(2).sum(-1, keepdim=True) / v.shape[-1] + eps).sqrt()
              for v in (x if norm_before_gate else x * gate).split(group_size or x.shape[-1], -1)]
    y = torch.cat(normed, -1) * weight + (0.0 if bias is None else bias)
    return y * gate if norm_before_gate else y
