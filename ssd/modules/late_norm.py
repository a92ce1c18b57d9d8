"""A long prompt through a Mamba-2 block whose gated norm is finished in the sum after it.

The norm multiplies each token by one factor, which may as well come after the output projection. So the scan gates, applies
the norm's weight and adds up squares, and the launch that adds to the residual stream scales (docs/block.md, (N9)). That
spares a launch which reads the SSD's output and the gate, and writes the output again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..api import take_inputs
from ..block.arguments import takes_kernels
from ..block.conv1d import check_convolution
from ..block.conv1d_scan_norm import split_xBC
from ..block.gated_norm import check_norm
from ..block.kernels.conv1d_fwd import conv1d_fwd
from ..block.kernels.residual_norm import Unscaled
from ..registry import belongs_to_user, is_peer, resolve
from ..runtime import value_checks
from ..runtime.products import multiply
from ..types import Options, SSDInputs
from .mamba2 import Mamba2, Mamba2Cache, get_states
from .token_step import has_plain_weights

if TYPE_CHECKING:
    from .language_model import _Layer

SHORTEST = 1 << 22  # channels of all tokens of a prompt: shorter ones wait for the host, which has more to do here
_OURS = Mamba2.forward, Mamba2._mix  # which this stands for


def takes_late_norm(layer: _Layer, residual: Tensor, cache: Mamba2Cache) -> bool:
    """Whether `mix_to_norm` takes a layer with these tokens, (batch, seqlen, d_model), for inference; nobody `is_seen`."""
    mixer = layer.mixer
    if residual.numel() < SHORTEST or not takes_kernels(residual) or value_checks.ENABLED or type(mixer) is not Mamba2:
        return False
    if (Mamba2.forward, Mamba2._mix) != _OURS or "_mix" in vars(mixer) or mixer._compiled_call_impl:  # somebody else's
        return False
    if not mixer.rmsnorm or mixer.ngroups > 1 or mixer.d_inner != mixer.d_ssm or mixer.context_group is not None:
        return False
    if not has_plain_weights(layer, residual, cache) or mixer.norm.group_size not in (None, mixer.d_ssm):
        return False
    if mixer.in_proj.bias is not None or mixer.out_proj.bias is not None:
        return False
    if type(mixer.variant) is not str or is_peer(mixer.variant) or belongs_to_user(mixer.variant):  # its forward may be its own
        return False
    options = mixer.options or Options()
    inputs = _describe_inputs(mixer, residual)
    variant = resolve(mixer.variant, inputs, options, "fwd")
    return variant.scan_to_norm is not None and variant.explain_no_late_norm(inputs, options) is None


def mix_to_norm(mixer: Mamba2, u: Tensor, cache: Mamba2Cache, A: Tensor | None) -> Unscaled:
    """As `Mamba2.forward` with a cache, before the factor of its norm. A: of `Mamba2.step`."""
    mixer.check_input(u, ("batch", "seqlen"), A)
    zxbcdt = multiply(u, mixer.in_proj.weight)
    z, xBC, dt = zxbcdt.split([mixer.d_ssm, cache.conv_state.shape[1], mixer.nheads], -1)
    filter, weight, eps = mixer.get_filter(), mixer.norm.weight, mixer.norm.eps
    check_convolution(xBC.mT, filter, mixer.conv1d.bias, None, cache.conv_state, True, None, "silu", None, None)
    check_norm(z, weight, None, z, eps, mixer.d_ssm, False)
    with torch.cuda.device_of(u):
        xBC, conv_state = conv1d_fwd(xBC, filter, mixer.conv1d.bias, None, cache.conv_state, True, True)
        x, B, C = split_xBC(xBC.mT, mixer.d_ssm, mixer.headdim, mixer.ngroups)
        heads = mixer.nheads, mixer.headdim
        options, inputs = take_inputs(
            x, dt, mixer.get_A() if A is None else A, B, C, mixer.chunk_size, mixer.get_D(), z.unflatten(-1, heads),
            mixer.dt_bias, get_states(cache), None, None, True, mixer.dt_limit, True, False, None, mixer.variant,
            mixer.options)
        out, ssm_state, sums = resolve(mixer.variant, inputs, options, "fwd").scan_to_norm(
            inputs, options, weight.view(heads))
    cache.ssm_state.copy_(ssm_state)
    cache.conv_state.copy_(conv_state)
    return Unscaled(multiply(out.flatten(2), mixer.out_proj.weight), sums, mixer.d_ssm, eps)


def _describe_inputs(mixer: Mamba2, u: Tensor) -> SSDInputs:
    """Tensors of the shapes and dtypes that the SSD would get, without memory of their own."""
    def like(*sizes: int) -> Tensor:
        return mixer.in_proj.weight.new_empty(()).expand(*u.shape[:2], *sizes)

    x, group = like(mixer.nheads, mixer.headdim), like(mixer.ngroups, mixer.d_state)
    return SSDInputs(x, like(mixer.nheads), mixer.A_log, group, group, mixer.chunk_size, mixer.get_D(), x, mixer.dt_bias)
