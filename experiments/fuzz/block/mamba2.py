"""A whole `ssd.modules.Mamba2` as a configuration."""

from dataclasses import dataclass, replace
from random import Random
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ssd.block import arguments
from ssd.modules import Mamba2

from ..common import Common, Values, draw_call, draw_dtypes, make_problem
from ..limits import Limits, draw_size
from ..problem import Problem, Tensors

_OFTEN_FP32 = ("dt_bias", "A_log", "D")


@dataclass(frozen=True)
class Config(Common):
    """headdim, chunk_size and what follows are arguments of `Mamba2`. mlp_heads: as many heads' channels are those of an MLP;
    decoded: the last tokens that are taken one by one, in modes without a gradient.
    """

    variant: str = "torch"
    seqlen: int = 1
    nheads: int = 2
    mlp_heads: int = 0
    ngroups: int = 1
    headdim: int = 1
    dstate: int = 1
    chunk_size: int = 16
    d_conv: int = 2
    D_has_hdim: bool = False
    rmsnorm: bool = False
    norm_before_gate: bool = False
    dt_limit: bool = False
    bias: bool = False
    conv_bias: bool = False
    documents: int = 0
    decoded: int = 0


def draw_shared(rng: Random, limits: Limits) -> Config:
    """What the kernels are compiled for. With expand = 1 a module has as many channels inside as outside."""
    ngroups = rng.choice((1, 1, 2))
    small = limits.channels < 64
    return Config(
        dtype=rng.choice(limits.dtypes), dtypes=draw_dtypes(rng, limits, _OFTEN_FP32),
        nheads=ngroups * rng.randint(1, 2 if small else 4), ngroups=ngroups,
        mlp_heads=rng.choice((0, 0, 1)), headdim=8 if small else rng.choice((8, 16, 24, 64, 64, 64)),
        dstate=8 if small else rng.choice((8, 16, 40, 64, 128)), chunk_size=rng.choice((16, 64, 128, 256)),
        d_conv=rng.randint(2, 4), D_has_hdim=rng.random() < 0.3, rmsnorm=rng.random() < 0.7,
        norm_before_gate=rng.random() < 0.5, dt_limit=rng.random() < 0.3, bias=rng.random() < 0.4,
        conv_bias=rng.random() < 0.7)


def draw_member(rng: Random, c: Config, limits: Limits) -> Config:
    how = draw_call(rng, limits, ("u", "in_proj.weight", "conv1d.weight", "dt_bias", "A_log", "D", "out_proj.weight"))
    seqlen = draw_size(rng, min(limits.seqlen, 400))
    decoded = rng.choice((0, 3)) if not how["wanted"] and seqlen > 3 and how["mode"] != "compile" else 0
    return replace(c, batch=rng.randint(1, min(3, limits.batch)), seqlen=seqlen, decoded=decoded,
                   documents=rng.choice((0, 0, 3)) if not decoded else 0, **how)


def problem(c: Config, turn: int, device: str) -> Problem:
    values = Values(c, turn, device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(c.seed)
        block = _make_module(c)
    made = {name: values.normal(*t.shape) / t.shape[-1] ** 0.5 if t.dim() > 1 else
            t.detach().to(device) + 0.1 * values.normal(*t.shape) for name, t in block.named_parameters()}
    made["u"] = values.normal(c.batch, c.seqlen, block.d_model)
    tensors = values.finish(made, _OFTEN_FP32)
    tensors["seq_idx"] = None
    if c.documents:
        ends = sorted(values.random.randint(0, c.seqlen) for _ in range(c.documents))
        tensors["seq_idx"] = torch.bucketize(torch.arange(c.seqlen), torch.tensor(ends), right=True).to(
            device, torch.int32).expand(c.batch, -1).contiguous()
    whole = _Whole(_make_module(c, c.variant, device="meta"), c.decoded)
    axes = {"out": "blc", "du": "blc"} | {f"d{name}": "." * t.dim() for name, t in made.items() if name != "u"}
    return make_problem(
        c, tensors, lambda _, given: _apply(whole, given), _apply_on_cpu, _apply_on_cpu, axes,
        summed=tuple(f"d{name}" for name in made if name != "u"), tokens=c.batch * c.seqlen,
        exact=c.mode != "streams")  # on several streams cuBLAS promises no bits


def _make_module(c: Config, variant: str = "torch", **made) -> nn.Module:
    return Mamba2(
        (c.nheads + c.mlp_heads) * c.headdim, d_state=c.dstate, d_conv=c.d_conv, expand=1, headdim=c.headdim,
        d_ssm=c.nheads * c.headdim, ngroups=c.ngroups, D_has_hdim=c.D_has_hdim, rmsnorm=c.rmsnorm,
        norm_before_gate=c.norm_before_gate, dt_limit=(0.01, 0.05) if c.dt_limit else (0.0, float("inf")), bias=c.bias,
        conv_bias=c.conv_bias, chunk_size=c.chunk_size, variant=variant, **made)


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
    parameters = {f"block.{name}": t for name, t in tensors.items() if name not in ("u", "seq_idx")}
    return {"out": functional_call(whole, parameters, (tensors["u"], tensors["seq_idx"]))}


def _apply_on_cpu(c: Config, tensors: Tensors) -> dict[str, Tensor]:
    """On the CPU, in torch alone; results come back to where the inputs are."""
    device = tensors["u"].device
    with patch.object(arguments, "INTERPRETED", False):  # torch's forms, even where Triton interprets kernels
        whole = _Whole(_make_module(c, device="meta"), c.decoded if tensors["u"].dtype != torch.float64 else 0)
        found = _apply(whole, {name: None if t is None else t.cpu() for name, t in tensors.items()})
    return {name: t.to(device) for name, t in found.items()}
