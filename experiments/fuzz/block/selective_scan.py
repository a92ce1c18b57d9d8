"""`selective_scan_fn` as a configuration."""

from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

from ssd.block import selective_scan_fn
from ssd.block.selective_scan import compute_in_torch

from ..common import Common, Values, draw_call, draw_dtypes, draw_layouts, draw_sizes, make_problem
from ..limits import Limits, draw_size
from ..problem import Problem, Tensors

DIFFERENTIABLE = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
_PARAMETERS = ("A", "D", "delta_bias")
_AXES = {"out": "bhl", "last_state": "bhn", "du": "bhl", "ddelta": "bhl", "dA": "hn", "dB": "bhnl", "dC": "bhnl", "dD": "h",
         "dz": "bhl", "ddelta_bias": "h"}
_LONGEST = 300  # the truth and the mirror walk token by token


@dataclass(frozen=True)
class Config(Common):
    """ngroups 0: B and C have no axis of groups. The function's sizes are those of its documentation."""

    seqlen: int = 1
    ngroups: int = 1
    channels: int = 1  # of a group
    dstate: int = 1
    D: bool = False
    z: bool = False
    delta_bias: bool = False
    delta_softplus: bool = False
    last_state: bool = False
    decay: float = 2.0

    @property
    def dim(self) -> int:
        return max(1, self.ngroups) * self.channels


def draw_shared(rng: Random, limits: Limits) -> Config:
    """What the kernels are compiled for; the walk over many channels takes states of at most 16."""
    walk = rng.random() < 0.5
    return Config(
        dtype=rng.choice(limits.dtypes), dtypes=draw_dtypes(rng, limits, DIFFERENTIABLE[1:]),
        layouts=draw_layouts(rng, (*DIFFERENTIABLE, "dout")), ngroups=rng.choice((0, 0, 1, draw_size(rng, 5))),
        channels=draw_size(rng, 4 * limits.channels if walk else limits.channels // 2),
        dstate=rng.choice((1, 2, 8, 16, 16)) if walk else draw_size(rng, limits.channels, (16,)), D=rng.random() < 0.6,
        z=rng.random() < 0.6, delta_bias=rng.random() < 0.6, delta_softplus=rng.random() < 0.6,
        last_state=rng.random() < 0.5)


def draw_member(rng: Random, c: Config, limits: Limits) -> Config:
    sizes = draw_sizes(rng, limits, draw_size(rng, min(_LONGEST, limits.seqlen)), 6 * c.dim * c.dstate)
    names = tuple(name for name in DIFFERENTIABLE if name not in ("D", "z", "delta_bias") or getattr(c, name))
    how = draw_call(rng, limits, names, ("out", "last_state") if c.last_state else ("out",))
    return replace(c, **sizes, decay=rng.choice((0.0, 2.0, 2.0, 16.0)), **how)


def problem(c: Config, turn: int, device: str) -> Problem:
    values = Values(c, turn, device)
    groups = (c.ngroups,) if c.ngroups else ()
    tokens = (c.batch, c.dim, c.seqlen)
    delta, bias = 0.5 * values.normal(*tokens), values.normal(c.dim) - 1
    tensors = values.finish({
        "u": values.normal(*tokens), "delta": delta if c.delta_softplus else delta.abs(),
        "A": -c.decay * values.uniform(0.01, 1.01, c.dim, c.dstate), "B": values.normal(c.batch, *groups, c.dstate, c.seqlen),
        "C": values.normal(c.batch, *groups, c.dstate, c.seqlen), "D": values.normal(c.dim) if c.D else None,
        "z": values.normal(*tokens) if c.z else None,
        "delta_bias": (bias if c.delta_softplus else bias.abs()) if c.delta_bias else None}, _PARAMETERS)
    axes = _AXES | ({} if c.ngroups else {"dB": "bnl", "dC": "bnl"})
    return make_problem(c, tensors, _run, _form, _form, axes, {"last_state": torch.float32} if c.last_state else {},
                        summed=("dA", "dD", "ddelta_bias", "dB", "dC"), tokens=max(c.batch * c.seqlen, c.channels))


def _results(c: Config, out: Tensor, last_state: Tensor | None) -> dict[str, Tensor]:
    return {"out": out} | ({"last_state": last_state} if c.last_state else {})


def _run(c: Config, tensors: Tensors) -> dict[str, Tensor]:
    found = selective_scan_fn(**tensors, delta_softplus=c.delta_softplus, return_last_state=c.last_state)
    return _results(c, *(found if c.last_state else (found, None)))


def _form(c: Config, t: Tensors) -> dict[str, Tensor]:
    """(S1) to (S4), token by token, in fp64 for fp64 inputs and else in fp32."""
    B, C = (t[name] if c.ngroups else t[name].unsqueeze(1) for name in ("B", "C"))
    return _results(c, *compute_in_torch(t["u"], t["delta"], t["A"], B, C, t["D"], t["z"], t["delta_bias"], c.delta_softplus))
