"""`causal_conv1d_update` and `selective_state_update`, one token of decoding each, as configurations."""

from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

from ssd.block import causal_conv1d_update, selective_state_update
from ssd.block.conv1d_update import compute_in_torch as conv_form
from ssd.block.state_update import compute_in_torch as state_form

from ..common import Common, Values, draw_call, draw_dtypes, draw_layouts, make_problem
from ..limits import Limits, draw_size
from ..problem import Problem, Tensors

_SPARE = 3  # rows of the state that no sequence has, where rows are named by indices


@dataclass(frozen=True)
class ConvConfig(Common):
    """tokens: 0 for one without an axis of tokens; spare: entries of the state more than the filter needs; ring: the state is
    written in turn; indexed: rows of the state are named, and every third sequence is padding.
    """

    dim: int = 1
    tokens: int = 0
    width: int = 2
    spare: int = 0
    bias: bool = False
    silu: bool = False
    ring: bool = False
    indexed: bool = False


@dataclass(frozen=True)
class StateConfig(Common):
    """tied: A, dt and dt_bias are numbers of a head, repeated by strides of 0; indexed: as in `ConvConfig`."""

    ngroups: int = 1
    heads_per_group: int = 1
    dim: int = 1
    dstate: int = 1
    D: bool = False
    z: bool = False
    dt_bias: bool = False
    dt_softplus: bool = False
    tied: bool = False
    indexed: bool = False


class Conv:
    """The part conv1d_update."""

    Config = ConvConfig

    @staticmethod
    def draw_shared(rng: Random, limits: Limits) -> ConvConfig:
        """What the kernels are compiled for."""
        return ConvConfig(
            dtype=rng.choice(limits.dtypes), dtypes=draw_dtypes(rng, limits, ("conv_state", "weight", "bias")),
            layouts=draw_layouts(rng, ("x", "conv_state", "weight", "bias")),
            dim=draw_size(rng, 8 * limits.channels, (64, 1792)), tokens=rng.choice((0, 0, 1, 2, 5)), width=rng.randint(2, 4),
            spare=rng.choice((0, 0, 1, 3)), bias=rng.random() < 0.6, silu=rng.random() < 0.6, ring=rng.random() < 0.3,
            indexed=rng.random() < 0.3)

    @staticmethod
    def draw_member(rng: Random, c: ConvConfig, limits: Limits) -> ConvConfig:
        return replace(c, batch=draw_size(rng, 8 * limits.batch), **draw_call(rng, limits, ()))

    @staticmethod
    def problem(c: ConvConfig, turn: int, device: str) -> Problem:
        values = Values(c, turn, device)
        rows = c.batch + _SPARE * c.indexed
        had = [values.random.randint(0, 100) for _ in range(c.batch)]
        tensors = values.finish({
            "x": values.normal(c.batch, c.dim, *((c.tokens,) if c.tokens else ())),
            "conv_state": values.normal(rows, c.dim, c.width - 1 + c.spare), "weight": values.normal(c.dim, c.width),
            "bias": values.normal(c.dim) if c.bias else None,
            "cache_seqlens": torch.tensor(had, device=device, dtype=torch.int32) if c.ring else None,
            "conv_state_indices": _indices(c.batch, rows, values, device) if c.indexed else None}, ("weight", "bias"))
        axes = {"out": "bhl" if c.tokens else "bh", "conv_state": "bhn"}
        return make_problem(c, tensors, _conv, _conv_form, _conv_form, axes)


class State:
    """The part state_update."""

    Config = StateConfig

    @staticmethod
    def draw_shared(rng: Random, limits: Limits) -> StateConfig:
        """What the kernels are compiled for."""
        return StateConfig(
            dtype=rng.choice(limits.dtypes),
            dtypes=draw_dtypes(rng, limits, ("dt", "A", "B", "C", "D", "z", "dt_bias", "state")),
            layouts=draw_layouts(rng, ("x", "B", "C", "D", "z", "state")), ngroups=draw_size(rng, 4),
            heads_per_group=draw_size(rng, min(16, limits.nheads)), dim=draw_size(rng, limits.channels, (64,)),
            dstate=draw_size(rng, limits.channels, (16, 128)), D=rng.random() < 0.6, z=rng.random() < 0.6,
            dt_bias=rng.random() < 0.6, dt_softplus=rng.random() < 0.6, tied=rng.random() < 0.5, indexed=rng.random() < 0.3)

    @staticmethod
    def draw_member(rng: Random, c: StateConfig, limits: Limits) -> StateConfig:
        row = c.ngroups * c.heads_per_group * c.dim * c.dstate
        return replace(c, batch=max(1, min(draw_size(rng, 4 * limits.batch), limits.elements // row)),
                       **draw_call(rng, limits, ()))

    @staticmethod
    def problem(c: StateConfig, turn: int, device: str) -> Problem:
        values = Values(c, turn, device)
        h, p, n = c.ngroups * c.heads_per_group, c.dim, c.dstate
        rows, wide = c.batch + _SPARE * c.indexed, 1 if c.tied else p
        made = values.finish({
            "state": values.normal(rows, h, p, n), "x": values.normal(c.batch, h, p),
            "dt": values.uniform(0.05, 1.05, c.batch, h, wide), "A": -values.uniform(0.05, 1.05, h, wide, 1 if c.tied else n),
            "B": values.normal(c.batch, c.ngroups, n), "C": values.normal(c.batch, c.ngroups, n),
            "D": values.normal(h, p) if c.D else None, "z": values.normal(c.batch, h, p) if c.z else None,
            "dt_bias": values.uniform(0.05, 1.05, h, wide) if c.dt_bias else None,
            "state_batch_indices": _indices(c.batch, rows, values, device) if c.indexed else None}, ("A", "D", "dt_bias"))
        return make_problem(c, made, _state, _state_form, _state_form, {"out": "bhp", "state": "bhpn"})


def _indices(batch: int, rows: int, values: Values, device: str) -> Tensor:
    """Rows in no order, each at most once; every third is padding."""
    chosen = values.random.sample(range(rows), batch)
    return torch.tensor([-1 if n % 3 == 1 else row for n, row in enumerate(chosen)], device=device, dtype=torch.int32)


def _conv(c: ConvConfig, tensors: Tensors) -> dict[str, Tensor]:
    state = tensors["conv_state"].clone(memory_format=torch.preserve_format)
    out = causal_conv1d_update(**tensors | {"conv_state": state}, activation="silu" if c.silu else None)
    return {"out": out, "conv_state": state}


def _conv_form(c: ConvConfig, t: Tensors) -> dict[str, Tensor]:
    state, x = t["conv_state"].clone(), t["x"] if c.tokens else t["x"].unsqueeze(2)
    out = torch.empty_like(x)
    conv_form(x, state, t["weight"], t["bias"], c.silu, *(None if t[name] is None else t[name].long() for name in (
        "cache_seqlens", "conv_state_indices")), out)
    return {"out": out if c.tokens else out.squeeze(2), "conv_state": state}


def _expand(c: StateConfig, t: Tensors) -> Tensors:
    """With the numbers of a head repeated where they are tied."""
    h, p, n = c.ngroups * c.heads_per_group, c.dim, c.dstate
    repeated = {"dt": t["dt"].expand(c.batch, h, p), "A": t["A"].expand(h, p, n),
                "dt_bias": None if t["dt_bias"] is None else t["dt_bias"].expand(h, p)}
    return t | repeated | {"state": t["state"].clone(memory_format=torch.preserve_format)}


def _state(c: StateConfig, tensors: Tensors) -> dict[str, Tensor]:
    given = _expand(c, tensors)
    return {"out": selective_state_update(**given, dt_softplus=c.dt_softplus), "state": given["state"]}


def _state_form(c: StateConfig, tensors: Tensors) -> dict[str, Tensor]:
    t = _expand(c, tensors)
    order = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias")
    out = state_form(*(t[name] for name in order), c.dt_softplus, t["state_batch_indices"])
    return {"out": out, "state": t["state"]}
