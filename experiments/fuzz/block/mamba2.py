"""A whole `ssd.modules.Mamba2` as a configuration."""

from dataclasses import dataclass, replace
from functools import partial
from random import Random

import torch
from torch import Tensor, nn

from ..common import Values, draw_call, make_problem
from ..limits import Limits, draw_size
from ..problem import Problem, Tensors
from .mamba2_module import DIFFERENTIABLE, OFTEN_FP32, ModuleConfig, call, call_on_cpu, draw_settings, draw_values, make_module

_ARGUMENTS = ("u", "seq_idx")


@dataclass(frozen=True)
class Config(ModuleConfig):
    """decoded: the last tokens that are taken one by one, in modes without a gradient."""

    documents: int = 0
    decoded: int = 0


def draw_shared(rng: Random, limits: Limits) -> Config:
    return Config(**draw_settings(rng, limits))


def draw_member(rng: Random, c: Config, limits: Limits) -> Config:
    how = draw_call(rng, limits, DIFFERENTIABLE)
    seqlen = draw_size(rng, min(limits.seqlen, 400))
    decoded = rng.choice((0, 3)) if not how["wanted"] and seqlen > 3 and how["mode"] != "compile" else 0
    return replace(c, batch=rng.randint(1, min(3, limits.batch)), seqlen=seqlen, decoded=decoded,
                   documents=rng.choice((0, 0, 3)) if not decoded else 0, **how)


def problem(c: Config, turn: int, device: str) -> Problem:
    values = Values(c, turn, device)
    made = draw_values(c, values, device)
    tensors = values.finish(made, OFTEN_FP32)
    tensors["seq_idx"] = None
    if c.documents:
        ends = sorted(values.random.randint(0, c.seqlen) for _ in range(c.documents))
        tensors["seq_idx"] = torch.bucketize(torch.arange(c.seqlen), torch.tensor(ends), right=True).to(
            device, torch.int32).expand(c.batch, -1).contiguous()
    whole = _Whole(make_module(c, c.variant, device="meta"), c.decoded)
    axes = {"out": "blc", "du": "blc"} | {f"d{name}": "." * t.dim() for name, t in made.items() if name != "u"}
    return make_problem(
        c, tensors, lambda _, given: _apply(whole, given), _apply_on_cpu, _apply_on_cpu, axes,
        summed=tuple(f"d{name}" for name in made if name != "u"), tokens=c.batch * c.seqlen,
        exact=c.mode != "streams")  # on several streams cuBLAS promises no bits


class _Whole(nn.Module):
    """The block as one call: all tokens at once, or the last ones by steps."""

    def __init__(self, block: nn.Module, decoded: int):
        super().__init__()
        self.block, self.decoded = block, decoded

    def forward(self, u: Tensor, seq_idx: Tensor | None) -> Tensor:
        if not self.decoded:
            return self.block(u, seq_idx)
        cache = self.block.new_cache(u.shape[0], u.dtype)
        parts = [self.block(u[:, : -self.decoded], cache=cache)]
        parts += [self.block.step(u[:, n], cache)[:, None] for n in range(u.shape[1] - self.decoded, u.shape[1])]
        return torch.cat(parts, 1)


def _apply(whole: _Whole, tensors: Tensors) -> dict[str, Tensor]:
    return {"out": call(whole, tensors, _ARGUMENTS)}


def _apply_on_cpu(c: Config, tensors: Tensors) -> dict[str, Tensor]:
    whole = _Whole(make_module(c, device="meta"), c.decoded if tensors["u"].dtype != torch.float64 else 0)
    return call_on_cpu(partial(_apply, whole), tensors)
