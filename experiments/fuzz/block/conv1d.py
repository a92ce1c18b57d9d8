"""`causal_conv1d_fn` as a configuration."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import torch
from torch import Tensor

from ssd.block import causal_conv1d_fn
from ssd.block.conv1d import compute_in_torch

from ..common import Common, Values, draw_call, draw_dtypes, draw_layouts, draw_sizes, make_problem
from ..limits import Limits, draw_size
from ..problem import DTYPES, Problem, Tensors

DIFFERENTIABLE = ("x", "weight", "bias", "initial_states")
_PARAMETERS = ("weight", "bias")
_AXES = {"out": "bhl", "final_states": "bhw", "dx": "bhl", "dweight": "hw", "dbias": "h", "dinitial_states": "bhw"}


@dataclass(frozen=True)
class Config(Common):
    """documents: as many in every row, of random lengths, some of them padding; 0: no seq_idx. With it there are no final
    states.
    """

    dim: int = 1
    seqlen: int = 1
    width: int = 2
    bias: bool = False
    silu: bool = False
    documents: int = 0
    initial_states: bool = False
    final_states: bool = False


def draw_shared(rng: Random, limits: Limits) -> Config:
    """What the kernels are compiled for."""
    documents = rng.random() < 0.4
    return Config(
        dtype=rng.choice(limits.dtypes), dtypes=draw_dtypes(rng, limits, DIFFERENTIABLE[1:]),
        layouts={"x": "channels"} if rng.random() < 0.6 else draw_layouts(rng, (*DIFFERENTIABLE, "dout", "seq_idx")),
        dim=draw_size(rng, 8 * limits.channels, (64, 1024, 1792)), width=rng.randint(2, 4), bias=rng.random() < 0.6,
        silu=rng.random() < 0.6, documents=rng.randint(1, 6) if documents else 0, initial_states=rng.random() < 0.4,
        final_states=not documents and rng.random() < 0.5)


def draw_member(rng: Random, c: Config, limits: Limits) -> Config:
    sizes = draw_sizes(rng, limits, draw_size(rng, limits.seqlen, (1, 2, 3, 64)), 4 * c.dim)
    names = tuple(name for name in DIFFERENTIABLE if name in ("x", "weight") or getattr(c, name))
    how = draw_call(rng, limits, names, ("out", "final_states") if c.final_states else ("out",))
    return replace(c, **sizes, **how)


def problem(c: Config, turn: int, device: str) -> Problem:
    values = Values(c, turn, device)
    tensors = values.finish({
        "x": values.normal(c.batch, c.dim, c.seqlen), "weight": values.normal(c.dim, c.width),
        "bias": values.normal(c.dim) if c.bias else None, "seq_idx": _numbers(c, values.random, device),
        "initial_states": values.normal(c.batch, c.dim, c.width - 1) if c.initial_states else None}, _PARAMETERS)
    return make_problem(c, tensors, partial(_call, causal_conv1d_fn), partial(_call, define), _mirror, _AXES,
                        {"final_states": DTYPES[c.dtype]} if c.final_states else {},
                        summed=("dweight", "dbias"), tokens=c.batch * c.seqlen)


def _numbers(c: Config, rng: Random, device: str) -> Tensor | None:
    """(batch, seqlen): documents in no order of their numbers, and of negative ones, which mark padding."""
    if not c.documents:
        return None
    rows = []
    for _ in range(c.batch):
        ends = sorted(rng.randint(0, c.seqlen) for _ in range(c.documents - 1))
        lengths = torch.tensor([*ends, c.seqlen]).diff(prepend=torch.tensor([0]))
        numbers = torch.tensor(rng.sample(range(100), c.documents)) * torch.tensor(rng.choices((1, 1, 1, -1), k=c.documents))
        rows.append(numbers.repeat_interleave(lengths))
    return torch.stack(rows).to(device, torch.int32)


def _results(c: Config, found: Tensor | tuple) -> dict[str, Tensor]:
    return {"out": found[0], "final_states": found[1]} if c.final_states else {"out": found}


def _call(function: Callable, c: Config, tensors: Tensors) -> dict[str, Tensor]:
    return _results(c, function(**tensors, return_final_states=c.final_states, activation="silu" if c.silu else None))


def _mirror(c: Config, t: Tensors) -> dict[str, Tensor]:
    tensors = (t[name] for name in ("x", "weight", "bias", "seq_idx", "initial_states"))
    out, final_states = compute_in_torch(*tensors, c.silu, c.final_states)
    return _results(c, (out, final_states) if c.final_states else out)


def define(x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None,
           initial_states: Tensor | None = None, return_final_states: bool = False,
           activation: str | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """`causal_conv1d_fn` by (C1) to (C3) in fp64, tap by tap: which position it is, and whether its document is the token's."""
    (batch, dim, seqlen), width = x.shape, weight.shape[1]
    before = x.new_zeros(batch, dim, width - 1) if initial_states is None else initial_states
    positions, tokens = torch.cat([before.double(), x.double()], 2), torch.arange(seqlen, device=x.device)
    number = torch.zeros(batch, seqlen, dtype=torch.int32, device=x.device) if seq_idx is None else seq_idx
    out = torch.zeros((), device=x.device).double() if bias is None else bias.double()[:, None]
    for back in range(width):
        seen = number[:, (tokens - back).clamp(min=0)] == number
        tap = torch.where(seen[:, None], positions[:, :, tokens + (width - 1 - back)], 0.0)
        out = out + weight.double()[:, width - 1 - back, None] * tap
    out = out if activation is None else out / (1 + torch.exp(-out))
    out = torch.where((number >= 0)[:, None], out, 0.0)
    return (out, positions[:, :, seqlen:]) if return_final_states else out
