"""A long prompt through a Mamba-2 block whose gated norm is finished after its output projection.

The norm multiplies each token by one factor, which may as well come after the projection. So the scan gates, applies the norm's
weight and sums squares, and the launch that adds to the residual stream multiplies by the factor: docs/block.md, (N9). That
spares a launch which reads the SSD's output and the gate, and writes the output again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..api import take_inputs
from ..block.arguments import takes_kernels
from ..block.conv1d_scan_norm import split_xBC
from ..block.kernels.conv1d_fwd import conv1d_fwd
from ..block.kernels.residual_norm import Unscaled
from ..registry import belongs_to_user, is_peer, resolve
from ..runtime import value_checks
from ..runtime.products import multiply
from ..types import Options, SSDInputs
from .mamba2 import Mamba2, Mamba2Cache, widen
from .token_step import has_plain_weights

if TYPE_CHECKING:
    from .language_model import _Layer

SHORTEST = 1 << 22  # d_model times tokens: a shorter prompt waits for the host, which has more to do here
_OURS = Mamba2.forward, Mamba2._mix  # what `mix_deferring_norm` stands for


def find_scan(layer: _Layer, residual: Tensor, cache: Mamba2Cache) -> Callable | None:
    """The `Variant.scan_deferring_norm` by which `mix_deferring_norm` takes a layer, for inference; None if it must not.

    residual: the stream before the layer, (batch, seqlen, d_model). Nobody `is_seen`, and there is neither mask nor seq_idx.
    """
    mixer = layer.mixer
    if residual.numel() < SHORTEST or not takes_kernels(residual) or value_checks.ENABLED:
        return None
    if not has_plain_weights(layer, residual, cache) or mixer.in_proj.bias is not None or mixer.out_proj.bias is not None:
        return None
    if not mixer.rmsnorm or mixer.norm_before_gate or mixer.ngroups > 1 or mixer.context_group is not None:
        return None
    if (Mamba2.forward, Mamba2._mix) != _OURS or "_mix" in vars(mixer):  # somebody else's
        return None
    if any(module._compiled_call_impl for module in (layer.norm, mixer, *mixer.children())):
        return None
    if not _is_sound(mixer, residual, cache.conv_state.shape[1]):
        return None  # `Mamba2.forward` says what is wrong
    # a user's variant may be a copy of one of ours with another forward
    if type(mixer.variant) is not str or is_peer(mixer.variant) or belongs_to_user(mixer.variant):
        return None
    options, inputs = mixer.options or Options(), _describe_inputs(mixer, residual)
    variant = resolve(mixer.variant, inputs, options, "fwd")
    if variant.scan_deferring_norm is None or variant.explain_no_deferred_norm(inputs, options):
        return None
    return variant.scan_deferring_norm


def mix_deferring_norm(mixer: Mamba2, scan: Callable, u: Tensor, cache: Mamba2Cache, A: Tensor | None) -> Unscaled:
    """As `Mamba2.forward` with a cache, which it overwrites too, but for the factor of the gated norm.

    Args:
        scan: of `find_scan`.
        u: (batch, seqlen, d_model), normed.
        A: of `Mamba2.step`.

    Raises:
        TypeError, ValueError, RuntimeError: as `Mamba2.forward`.
    """
    zxbcdt = multiply(u, mixer.in_proj.weight)
    z, xBC, dt = zxbcdt.split([mixer.d_ssm, cache.conv_state.shape[1], mixer.nheads], -1)
    with torch.cuda.device_of(u):
        xBC, conv_state = conv1d_fwd(xBC, mixer.get_filter(), mixer.conv1d.bias, None, cache.conv_state, True, True)
        x, B, C = split_xBC(xBC.mT, mixer.d_ssm, mixer.headdim, mixer.ngroups)
        options, inputs = take_inputs(
            x, dt, mixer.get_A() if A is None else A, B, C, mixer.chunk_size, mixer.get_D(), z.unflatten(-1, x.shape[2:]),
            mixer.dt_bias, widen(cache.ssm_state), seq_idx=None, cu_seqlens=None, dt_softplus=True, dt_limit=mixer.dt_limit,
            return_final_states=True, return_varlen_states=False, state_dtype=None, variant=mixer.variant,
            options=mixer.options)
        out, ssm_state, sums = scan(inputs, options, mixer.norm.weight.view(x.shape[2:]))
    added = Unscaled(multiply(out.flatten(2), mixer.out_proj.weight), sums, mixer.d_ssm, mixer.norm.eps)
    cache.ssm_state.copy_(ssm_state)
    cache.conv_state.copy_(conv_state)
    return added


def _is_sound(mixer: Mamba2, residual: Tensor, conv_dim: int) -> bool:
    """Whether the stream and the weights have the sizes that the block was made for, and the gated norm an eps.

    conv_dim: channels of x, B and C together.
    """
    sizes = (
        (residual[0], (residual.shape[1], mixer.d_model)),
        (mixer.in_proj.weight, (mixer.d_ssm + conv_dim + mixer.nheads, mixer.d_model)),
        (mixer.conv1d.weight, (conv_dim, 1, mixer.d_conv)), (mixer.conv1d.bias, (conv_dim,)),
        (mixer.norm.weight, (mixer.d_ssm,)), (mixer.out_proj.weight, (mixer.d_model, mixer.d_ssm)))
    eps = mixer.norm.eps
    return all(t is None or t.shape == size for t, size in sizes) and type(eps) is float and 0 <= eps < math.inf


def _describe_inputs(mixer: Mamba2, u: Tensor) -> SSDInputs:
    """What a variant is chosen by: sizes, dtypes and the device, of tensors without memory of their own."""
    def like(*sizes: int) -> Tensor:
        return mixer.in_proj.weight.new_empty(()).expand(*u.shape[:2], *sizes)

    x, group = like(mixer.nheads, mixer.headdim), like(mixer.ngroups, mixer.d_state)
    return SSDInputs(x, like(mixer.nheads), mixer.A_log, group, group, mixer.chunk_size, mixer.get_D(), x, mixer.dt_bias)
