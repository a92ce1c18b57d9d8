"""`causal_conv1d_fn` of documents with states, by cu_seqlens, as a configuration."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from random import Random

import torch
from torch import Tensor

from ssd.block import causal_conv1d_fn
from ssd.block.conv1d import compute_in_torch

from ..common import Common, Values, draw_call, draw_dtypes, draw_layouts, draw_sizes, get_integers, make_problem
from ..documents import draw_bounds
from ..layouts import lay_out
from ..limits import Limits, draw_size
from ..problem import DTYPES, Problem, Tensors
from .conv1d import define

DIFFERENTIABLE = ("x", "weight", "bias", "initial_states")
_AXES = {"out": "bhl", "final_states": "bhw", "dx": "bhl", "dweight": "hw", "dbias": "h", "dinitial_states": "bhw"}


@dataclass(frozen=True)
class Config(Common):
    """placed: final states are written where the caller says, `final_states_out`; int64: cu_seqlens are."""

    dim: int = 1
    seqlen: int = 1
    width: int = 2
    bias: bool = False
    activation: str | None = None
    ndocs: int = 1
    int64: bool = False
    initial_states: bool = False
    final_states: bool = False
    placed: bool = False

    @property
    def final_dtype(self) -> torch.dtype:
        return DTYPES[self.dtypes.get("final_states_out", self.dtype) if self.placed else self.dtype]


def draw_shared(rng: Random, limits: Limits) -> Config:
    """What the kernels are compiled for."""
    final_states = rng.random() < 0.7
    return Config(
        dtype=rng.choice(limits.dtypes), dtypes=draw_dtypes(rng, limits, (*DIFFERENTIABLE[1:], "final_states_out")),
        layouts={"x": "channels"} if rng.random() < 0.5 else draw_layouts(
            rng, (*DIFFERENTIABLE, "dout", "dfinal_states", "final_states_out")),
        dim=draw_size(rng, 8 * limits.channels, (64, 1024, 1792)), width=rng.randint(2, 4), bias=rng.random() < 0.6,
        activation=rng.choice((None, "silu", "swish")), int64=rng.random() < 0.3, initial_states=rng.random() < 0.7,
        final_states=final_states, placed=final_states and rng.random() < 0.3)


def draw_member(rng: Random, c: Config, limits: Limits) -> Config:
    seqlen = draw_sizes(rng, limits, draw_size(rng, limits.seqlen, (1, 2, 3, 64)), 4 * c.dim)["seqlen"]
    names = tuple(name for name in DIFFERENTIABLE if name in ("x", "weight") or getattr(c, name))
    how = draw_call(rng, limits, names, ("out", "final_states") if c.final_states else ("out",))
    return replace(c, seqlen=seqlen, ndocs=draw_size(rng, 12), **how)


def problem(c: Config, turn: int, device: str) -> Problem:
    values = Values(c, turn, device)
    bounds = draw_bounds(values.random, c.seqlen, c.ndocs, c.width)
    tensors = values.finish({
        "x": values.normal(1, c.dim, c.seqlen), "weight": values.normal(c.dim, c.width),
        "bias": values.normal(c.dim) if c.bias else None,
        "initial_states": values.normal(c.ndocs, c.dim, c.width - 1) if c.initial_states else None,
        "cu_seqlens": torch.tensor(bounds, device=device, dtype=get_integers(c))}, ("weight", "bias"))
    return make_problem(c, tensors, _run, _truth, _mirror, _AXES, {"final_states": c.final_dtype} if c.final_states else {},
                        summed=("dweight", "dbias"), tokens=c.seqlen)


def _run(c: Config, tensors: Tensors) -> dict[str, Tensor]:
    place = None
    if c.placed:
        empty = tensors["x"].new_empty(c.ndocs, c.dim, c.width - 1, dtype=c.final_dtype)
        place = lay_out(empty, c.layouts.get("final_states_out", "contiguous"))
    found = causal_conv1d_fn(**tensors, return_final_states=c.final_states, final_states_out=place, activation=c.activation)
    if not c.final_states:
        return {"out": found}
    return {"out": found[0], "final_states": place if c.placed else found[1]}


def _truth(c: Config, tensors: Tensors) -> dict[str, Tensor]:
    return _run_apart(c, tensors, partial(define, return_final_states=True, activation=c.activation))


def _mirror(c: Config, tensors: Tensors) -> dict[str, Tensor]:
    """Sums over documents are rounded once, and states to the dtype of x before they are used."""
    wide = {name: None if tensors[name] is None else tensors[name].float() for name in ("weight", "bias")}
    states = tensors["initial_states"]
    wide["initial_states"] = None if states is None else states.to(tensors["x"].dtype)
    found = _run_apart(c, tensors | wide, partial(_convolve_row, silu=c.activation is not None))
    return found | ({"final_states": found["final_states"].to(c.final_dtype)} if c.final_states else {})


def _convolve_row(x: Tensor, weight: Tensor, bias: Tensor | None, initial_states: Tensor, silu: bool) -> tuple[Tensor, Tensor]:
    """out and final states, from one row with the state: its gradient is rounded before that of final states is added."""
    row, held = torch.cat([initial_states, x], 2), initial_states.shape[2]
    return compute_in_torch(row, weight, bias, None, None, silu)[0][:, :, held:], row[:, :, -held:]


def _run_apart(c: Config, t: Tensors, convolve: Callable) -> dict[str, Tensor]:
    """Each document by itself; an empty one hands its state on."""
    x, states, outs, ends = t["x"], t["initial_states"], [], []
    for d, (start, end) in enumerate(pairwise(t["cu_seqlens"].tolist())):
        state = x.new_zeros(1, c.dim, c.width - 1) if states is None else states[d : d + 1]
        if start < end:
            out, state = convolve(x[:, :, start:end], t["weight"], t["bias"], initial_states=state)
            outs.append(out)
        ends.append(state)
    return {"out": torch.cat(outs, 2)} | ({"final_states": torch.cat(ends)} if c.final_states else {})
