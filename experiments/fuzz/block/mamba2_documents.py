"""A whole `ssd.modules.Mamba2` on documents in a row, with states of theirs in and out, as a configuration."""

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from random import Random

import torch
from torch import Tensor, nn

from ssd.modules import Mamba2
from ssd.modules.mamba2 import Mamba2Cache

from ..common import Values, draw_call, draw_dtypes, draw_layouts, get_integers, make_problem
from ..documents import draw_bounds
from ..limits import Limits, draw_size
from ..problem import DTYPES, Problem, Tensors
from .mamba2_module import DIFFERENTIABLE, OFTEN_FP32, ModuleConfig, call, call_on_cpu, draw_settings, draw_values, make_module

_STATES = ("conv_states", "ssm_states")
_FINAL = ("final_conv_states", "final_ssm_states")
_CACHED = ("cached_conv_states", "cached_ssm_states")
_ARGUMENTS = ("u", "cu_seqlens", *_STATES)
_AXES = {"out": "blc", "du": "blc"} | {
    f"{prefix}{name}_states": axes for prefix in ("d", "final_", "cached_")
    for name, axes in (("conv", "bcl"), ("ssm", "bhpn"))}  # a state of the convolution is tokens


@dataclass(frozen=True)
class Config(ModuleConfig):
    """states: the documents' are given; cached: as a cache, in modes without a gradient; returned: states are asked for."""

    ndocs: int = 1
    int64: bool = False
    states: bool = False
    cached: bool = False
    returned: bool = False


def draw_shared(rng: Random, limits: Limits) -> Config:
    settings = draw_settings(rng, limits)
    settings["dtypes"] |= draw_dtypes(rng, limits, _STATES)
    return Config(**settings, layouts=draw_layouts(rng, ("u", *_STATES, "dout", *(f"d{name}" for name in _FINAL))),
                  int64=rng.random() < 0.3, states=rng.random() < 0.8, returned=rng.random() < 0.7)


def draw_member(rng: Random, c: Config, limits: Limits) -> Config:
    how = draw_call(rng, limits, (*DIFFERENTIABLE, *(_STATES if c.states else ())),
                    ("out", *(_FINAL if c.returned else ())))
    return replace(c, seqlen=draw_size(rng, min(limits.seqlen, 400)), ndocs=draw_size(rng, 8),
                   cached=c.states and not how["wanted"] and rng.random() < 0.6, **how)


def problem(c: Config, turn: int, device: str) -> Problem:
    values = Values(c, turn, device)
    made = draw_values(c, values, device)
    parameters = tuple(name for name in made if name != "u")
    block = make_module(c, c.variant, device="meta")
    bounds = draw_bounds(values.random, c.seqlen, c.ndocs, c.d_conv)
    conv_dim = len(made["conv1d.weight"])
    tensors = values.finish(made | {
        "cu_seqlens": torch.tensor(bounds, device=device, dtype=get_integers(c)),
        "conv_states": values.normal(c.ndocs, conv_dim, c.d_conv - 1) if c.states else None,
        "ssm_states": values.normal(c.ndocs, c.nheads, c.headdim, c.dstate) if c.states else None},
        (*OFTEN_FP32, "ssm_states"))
    whole = _Whole(block, c)
    return make_problem(
        c, tensors, lambda _, given: call(whole, given, _ARGUMENTS), _run_apart, _run_apart,
        _AXES | {f"d{name}": "." * made[name].dim() for name in parameters},
        dict(zip(_FINAL, (DTYPES[c.dtype], torch.float32), strict=True)) if c.returned else {},
        summed=tuple(f"d{name}" for name in parameters), tokens=c.seqlen,
        exact=c.mode != "streams")  # on several streams cuBLAS promises no bits


class _Whole(nn.Module):
    """The block as one call, on copies of the cache."""

    def __init__(self, block: Mamba2, c: Config):
        super().__init__()
        self.block, self.config = block, c

    def forward(self, u: Tensor, cu_seqlens: Tensor, conv_states: Tensor | None,
                ssm_states: Tensor | None) -> dict[str, Tensor]:
        c, given, found = self.config, {}, {}
        if c.states and c.cached:
            given["cache"] = Mamba2Cache(*(t.clone(memory_format=torch.preserve_format) for t in (conv_states, ssm_states)))
        elif c.states:
            given["states"] = Mamba2Cache(conv_states, ssm_states)
        out = self.block(u, cu_seqlens=cu_seqlens, return_states=c.returned, **given)
        if c.returned:
            out, after = out
            found |= _name_states(_FINAL, after)
        if c.cached and c.states:
            found |= _name_states(_CACHED, given["cache"])
        return {"out": out} | found


def _name_states(names: tuple[str, str], states: Mamba2Cache) -> dict[str, Tensor]:
    return dict(zip(names, (states.conv_state, states.ssm_state), strict=True))


def _run_apart(c: Config, tensors: Tensors) -> dict[str, Tensor]:
    return call_on_cpu(partial(_run_each, c), tensors)


def _run_each(c: Config, tensors: Tensors) -> dict[str, Tensor]:
    """Each document by itself, and states of the dtypes that they come in; an empty document hands its state on. What is summed
    over documents is rounded once, and states of the convolution to the dtype of u before they are used.
    """
    u, step = tensors["u"], _Step(make_module(c, device="meta"))
    wide = torch.promote_types(u.dtype, torch.float32)
    weights = {name: t.to(torch.promote_types(t.dtype, wide)) for name, t in tensors.items() if name not in _ARGUMENTS}
    size = c.ndocs, len(tensors["conv1d.weight"]), c.d_conv - 1
    before = [u.new_zeros(size) if tensors["conv_states"] is None else tensors["conv_states"].to(u.dtype),
              u.new_zeros(c.ndocs, c.nheads, c.headdim, c.dstate) if tensors["ssm_states"] is None else tensors["ssm_states"]]
    outs, ends = [], []
    for d, (start, end) in enumerate(pairwise(tensors["cu_seqlens"].tolist())):
        after = [t[d : d + 1] for t in before]
        if start < end:
            given = {name: t.to(tensors[name].dtype) for name, t in weights.items()} | {"u": u[:, start:end]}
            out, *after = call(step, given | dict(zip(_STATES, after, strict=True)), ("u", *_STATES))
            outs.append(out)
        ends.append(after)
    conv_states, ssm_states = (torch.cat([t.to(dtype) for t in column])
                               for column, dtype in zip(zip(*ends, strict=True), (u.dtype, wide), strict=True))
    found = {"out": torch.cat(outs, 1)}
    if c.returned:
        found |= {"final_conv_states": conv_states, "final_ssm_states": ssm_states}
    if c.cached and c.states:
        found |= {"cached_conv_states": conv_states.to(tensors["conv_states"].dtype),
                  "cached_ssm_states": ssm_states.to(tensors["ssm_states"].dtype)}
    return found


class _Step(nn.Module):
    """The block on a document with a state."""

    def __init__(self, block: Mamba2):
        super().__init__()
        self.block = block

    def forward(self, u: Tensor, conv_states: Tensor, ssm_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, after = self.block(u, states=Mamba2Cache(conv_states, ssm_states), return_states=True)
        return out, after.conv_state, after.ssm_state
