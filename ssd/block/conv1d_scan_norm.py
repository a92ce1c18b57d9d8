"""Causal convolution, SSD and gated RMSNorm of a Mamba-2 block's packed projection, as one op.

The backward writes the gradients of z, x, B, C and dt to where each lies in that of the projection. Those of three ops torch
would put together, and move each of them once or twice more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import autograd
from ..kernels.arguments import contiguous
from ..kernels.sum_parts import settle
from ..runtime.custom_ops import DifferentiableOp, new_like
from ..types import SSDGrads
from .gated_norm import make_rows
from .kernels.conv1d_bwd import conv1d_bwd
from .kernels.conv1d_fwd import conv1d_fwd
from .kernels.gated_norm import gated_norm, gated_norm_bwd

_TENSORS = 11


class Settings(NamedTuple):
    """What the op takes beside tensors, as its schema lists it: of the convolution, of the norm, of the SSD."""

    silu: bool
    return_conv_states: bool
    eps: float
    norm_before_gate: bool
    headdim: int
    ngroups: int
    chunk_size: int
    dt_min: float
    dt_max: float
    state_dtype: torch.dtype | None
    variant: str
    options: str  # of `autograd.encode`
    save: bool


_SETTINGS = len(Settings._fields)


def conv1d_scan_norm(tensors: tuple[Tensor | None, ...], settings: Settings) -> tuple[Tensor | None, ...]:
    """out (batch, seqlen, dim), final_states, and the convolution's states, absent unless asked for; all checked before.

    tensors: zxbcdt, packed as [z | x B C | dt]; the convolution's weight (conv_dim, width) and bias;
        dt_bias, A, D; the norm's weight; initial_states, the convolution's; seq_idx, and it as `number_documents` gives it.
    """
    return _CONV1D_SCAN_NORM(tensors, settings, settings.save)[:3]


def _make_channels_contiguous(zxbcdt: Tensor) -> Tensor:
    """Within the op: torch.compile gives it whatever strides it likes, also of what was made contiguous before."""
    return zxbcdt if zxbcdt.stride(2) == 1 else zxbcdt.contiguous()


def _slices(t: Tensor, dim: int, conv_dim: int) -> list[Tensor]:
    """z, xBC and dt."""
    return t.split([dim, conv_dim, t.shape[2] - dim - conv_dim], 2)


def split_xBC(xBC: Tensor, dim: int, headdim: int, ngroups: int) -> list[Tensor]:
    """x, B and C of (batch, seqlen, conv_dim) as the SSD has them."""
    group = (xBC.shape[2] - dim) // 2
    x, *groups = xBC.split([dim, group, group], 2)
    return [x.unflatten(2, (-1, headdim)), *[t.unflatten(2, (ngroups, -1)) for t in groups]]


def _scan_arguments(tensors: tuple[Tensor | None, ...], xBC: Tensor, dt: Tensor, s: Settings) -> tuple[tuple, tuple]:
    """Tensors and settings of the SSD's op."""
    _, _, _, dt_bias, A, D, norm_weight, initial_states, _, _, documents = tensors
    x, B, C = split_xBC(xBC, len(norm_weight), s.headdim, s.ngroups)
    return ((x, dt, A, B, C, D, None, dt_bias, initial_states, documents, None),
            (s.chunk_size, True, s.dt_min, s.dt_max, s.state_dtype, None, s.variant, s.options, s.save))


def _forward(*args):
    tensors, s = args[:_TENSORS], Settings(*args[_TENSORS:])
    zxbcdt, filter, bias, _, _, _, norm_weight, _, conv_states, seq_idx, _ = tensors
    dim = len(norm_weight)
    z, xBC, dt = _slices(_make_channels_contiguous(zxbcdt), dim, len(filter))
    with torch.cuda.device_of(zxbcdt):
        convolved, conv_states = conv1d_fwd(xBC, filter, contiguous(bias), contiguous(seq_idx), conv_states, s.silu,
                                            s.return_conv_states)
        of_scan, settings = _scan_arguments(tensors, convolved.mT, dt, s)
        y, final_states, _, _, _, prev_states = autograd.forward(*of_scan, *settings)
        out, rstd = gated_norm(make_rows(y.flatten(2)), norm_weight.contiguous(), None, make_rows(z), s.eps, dim // s.ngroups,
                               s.norm_before_gate, z.shape)
    return out, final_states, conv_states, *((convolved, y, prev_states, rstd) if s.save else (None,) * 4)


def _forward_fake(*args):
    tensors, s = args[:_TENSORS], Settings(*args[_TENSORS:])
    zxbcdt, filter, norm_weight = tensors[0], tensors[1], tensors[6]
    (batch, seqlen, _), (conv_dim, width), dim = zxbcdt.shape, filter.shape, norm_weight.shape[0]
    new = zxbcdt.new_empty
    convolved = new(batch, seqlen, conv_dim).mT
    of_scan, settings = _scan_arguments(tensors, convolved.mT, new(batch, seqlen, dim // s.headdim), s)
    y, final_states, _, _, _, prev_states = autograd.forward_fake(*of_scan, *settings)
    conv_states = new(batch, width - 1, conv_dim).mT if s.return_conv_states else new(0)
    rstd = new(batch * seqlen, s.ngroups, dtype=torch.float32)
    kept = (convolved, y, prev_states, rstd) if s.save else [new(0) for _ in range(4)]
    return new(batch, seqlen, dim), final_states, conv_states, *kept


def _backward(*args):
    tensors, between, settings = args[:_TENSORS], args[_TENSORS : -_SETTINGS], args[-_SETTINGS:]
    convolved, y, prev_states, rstd, dout, dfinal_states, dconv_states = between
    s = Settings(*settings)
    zxbcdt, filter, bias, _, _, _, norm_weight, _, conv_states, seq_idx, _ = tensors
    dim, conv_dim = len(norm_weight), len(filter)
    dzxbcdt = torch.empty(zxbcdt.shape, device=zxbcdt.device, dtype=zxbcdt.dtype)
    (z, xBC, dt), (dz, dxBC, ddt) = (_slices(t, dim, conv_dim) for t in (_make_channels_contiguous(zxbcdt), dzxbcdt))
    with torch.cuda.device_of(zxbcdt):
        if dout is None:  # of a loss of states alone
            dz.zero_()
            dy, dnorm_weight = torch.zeros_like(y), torch.zeros_like(norm_weight)
        else:
            dy, dnorm_weight, _, _ = gated_norm_bwd(
                make_rows(dout), make_rows(y.flatten(2)), norm_weight.contiguous(), None, make_rows(z), rstd, dim // s.ngroups,
                s.norm_before_gate, make_rows(dz))
        of_scan, settings = _scan_arguments(tensors, convolved.mT, dt, s)
        dconvolved = torch.empty(convolved.mT.shape, device=zxbcdt.device, dtype=zxbcdt.dtype)
        dx, dB, dC = split_xBC(dconvolved, dim, s.headdim, s.ngroups)
        gx, gdt, dA, gB, gC, dD, _, ddt_bias, dinitial_states, *_ = autograd.backward(
            *of_scan, None, None, prev_states, dy.view(y.shape), dfinal_states, *settings,
            into=SSDGrads(dx=dx, ddt=ddt, dB=dB, dC=dC))
        for gradient, place in ((gx, dx), (gdt, ddt), (gB, dB), (gC, dC)):
            settle(gradient, place)  # a variant of the user's need not know places
        _, dfilter, dbias, dconv_states = conv1d_bwd(
            xBC, filter, contiguous(bias), contiguous(seq_idx), conv_states, s.silu, dconvolved, dconv_states, dxBC)
    dconv_states = None if dconv_states is None else dconv_states.mT
    return dzxbcdt, dfilter, dbias, ddt_bias, dA, dD, dnorm_weight, dinitial_states, dconv_states, None, None


def _backward_fake(zxbcdt, filter, bias, dt_bias, A, D, norm_weight, initial_states, conv_states, *_):
    dconv_states = None if conv_states is None else conv_states.new_empty(conv_states.mT.shape).mT
    summed = [new_like(t, torch.float32) for t in (dt_bias, A, D)]
    return (new_like(zxbcdt), new_like(filter), new_like(bias), *summed, new_like(norm_weight),
            new_like(initial_states, torch.float32), dconv_states, None, None)


_CONV1D_SCAN_NORM = DifferentiableOp(
    "conv1d_scan_norm",
    "Tensor zxbcdt, Tensor filter, Tensor? bias, Tensor? dt_bias, Tensor A, Tensor D, Tensor norm_weight, "
    "Tensor? initial_states, Tensor? conv_states, Tensor? seq_idx, Tensor? documents",
    "bool silu, bool return_conv_states, float eps, bool norm_before_gate, int headdim, int ngroups, int chunk_size, "
    "float dt_min, float dt_max, ScalarType? state_dtype, str variant, str options, bool save",
    outputs=("out", "final_states", "final_conv_states"), kept=("convolved", "y", "prev_states", "rstd"),
    forward=_forward, fake=_forward_fake, backward=_backward, fake_backward=_backward_fake, replays=autograd.replays)
