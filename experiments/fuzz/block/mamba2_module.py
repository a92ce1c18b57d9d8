"""`ssd.modules.Mamba2` as what is drawn of it has it: settings, parameters, and a call with these on any device."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ssd.block import arguments
from ssd.modules import Mamba2

from ..common import Common, Values, draw_dtypes
from ..limits import Limits
from ..problem import Tensors

OFTEN_FP32 = ("dt_bias", "A_log", "D")
DIFFERENTIABLE = ("u", "in_proj.weight", "conv1d.weight", "dt_bias", "A_log", "D", "out_proj.weight")


@dataclass(frozen=True)
class ModuleConfig(Common):
    """headdim, chunk_size and what follows are arguments of `Mamba2`. mlp_heads: as many heads' channels are an MLP's."""

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


def draw_settings(rng: Random, limits: Limits) -> dict:
    """What the kernels are compiled for. With expand = 1 a module has as many channels inside as outside."""
    ngroups = rng.choice((1, 1, 2))
    small = limits.channels < 64
    return dict(
        dtype=rng.choice(limits.dtypes), dtypes=draw_dtypes(rng, limits, OFTEN_FP32),
        nheads=ngroups * rng.randint(1, 2 if small else 4), ngroups=ngroups,
        mlp_heads=rng.choice((0, 0, 1)), headdim=8 if small else rng.choice((8, 16, 24, 64, 64, 64)),
        dstate=8 if small else rng.choice((8, 16, 40, 64, 128)), chunk_size=rng.choice((16, 64, 128, 256)),
        d_conv=rng.randint(2, 4), D_has_hdim=rng.random() < 0.3, rmsnorm=rng.random() < 0.7,
        norm_before_gate=rng.random() < 0.5, dt_limit=rng.random() < 0.3, bias=rng.random() < 0.4,
        conv_bias=rng.random() < 0.7)


def make_module(c: ModuleConfig, variant: str = "torch", **made) -> Mamba2:
    return Mamba2(
        (c.nheads + c.mlp_heads) * c.headdim, d_state=c.dstate, d_conv=c.d_conv, expand=1, headdim=c.headdim,
        d_ssm=c.nheads * c.headdim, ngroups=c.ngroups, D_has_hdim=c.D_has_hdim, rmsnorm=c.rmsnorm,
        norm_before_gate=c.norm_before_gate, dt_limit=(0.01, 0.05) if c.dt_limit else (0.0, float("inf")), bias=c.bias,
        conv_bias=c.conv_bias, chunk_size=c.chunk_size, variant=variant, **made)


def draw_values(c: ModuleConfig, values: Values, device: str) -> Tensors:
    """Parameters by name, and u, (batch, seqlen, d_model)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(c.seed)
        block = make_module(c)
    made = {name: values.normal(*t.shape) / t.shape[-1] ** 0.5 if t.dim() > 1 else
            t.detach().to(device) + 0.1 * values.normal(*t.shape) for name, t in block.named_parameters()}
    return made | {"u": values.normal(c.batch, c.seqlen, block.d_model)}


def call(module: nn.Module, tensors: Tensors, names: tuple[str, ...]) -> Tensor | dict[str, Tensor]:
    """The module, whose `block` is a `Mamba2`, called with tensors of these names. The others are the block's parameters."""
    parameters = {f"block.{name}": t for name, t in tensors.items() if name not in names}
    return functional_call(module, parameters, tuple(tensors[name] for name in names))


def call_on_cpu(function: Callable[[Tensors], dict[str, Tensor]], tensors: Tensors) -> dict[str, Tensor]:
    """On the CPU, in torch alone; results come back to where the inputs are."""
    device = tensors["u"].device
    with patch.object(arguments, "INTERPRETED", False):  # torch's forms, even where Triton interprets kernels
        found = function({name: None if t is None else t.cpu() for name, t in tensors.items()})
    return {name: t.to(device) for name, t in found.items()}
