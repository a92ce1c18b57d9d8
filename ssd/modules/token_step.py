"""One token through the layers of a language model, in as few launches as its sizes allow.

A few sequences take three launches a layer (docs/block.md, "One token in three launches"). More take six: cuBLAS is faster then
at the projections, and the norm before a layer takes one launch with the sum before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ..block.arguments import takes_kernels
from ..block.gated_norm import RMSNormGated
from ..block.kernels.residual_norm import WIDEST, Unscaled, residual_norm
from ..block.kernels.token_projections import MOST, SHORTEST_GROUP, project_in, project_out
from ..runtime.custom_ops import are_plain, wants_gradient
from .mamba2 import Mamba2, Mamba2Cache, widen

if TYPE_CHECKING:
    from .language_model import _Layer

_DTYPES = (torch.bfloat16,)
_TAKEN_APART = {Tensor, nn.Parameter, type(None)}  # other classes may be quantized weights, of which nobody takes rows


def list_modules(module: nn.Module, without: nn.Module | None = None) -> list[nn.Module] | None:
    """The module and all in it but what is inside `without`, one in several places as often; None where `is_seen`. A GPU may
    wait for this, and `modules()` takes ten times as long.
    """
    found = [module]
    for one in found:
        if one._forward_hooks or one._forward_pre_hooks or "forward" in vars(one):
            return None
        if (inside := one._modules) and one is not without:
            found += [inner for inner in inside.values() if inner is not None]
    return None if _has_any_global_hook() else found


def is_seen(module: nn.Module) -> bool:
    """Whether calling the module, or one in it, calls somebody else's code: hooks, and a `forward` that was put into its place.
    Then modules are called, and no launch does their work.
    """
    return list_modules(module) is None


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module calls somebody else's code, whatever is in it: `is_seen` of itself alone."""
    own = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return bool(own) or _has_any_global_hook()


def compute_rates(layers: Sequence[_Layer]) -> Sequence[Tensor | None]:
    """A of each layer, by four launches however many layers there are; None, for a layer to compute its own, where a backward
    may follow, and where layers are on several GPUs or of other classes.
    """
    if any(type(layer.mixer) is not Mamba2 for layer in layers):
        return [None] * len(layers)
    A_log = [layer.mixer.A_log for layer in layers]  # pruned blocks may have different numbers of heads
    if wants_gradient(A_log) or not are_plain(A_log) or len({(t.device, t.dtype) for t in A_log}) > 1:
        return [None] * len(A_log)
    return (-widen(torch.cat(A_log)).exp()).split([*map(len, A_log)])


def can_finish(mixer: nn.Module) -> bool:
    """Whether `Mamba2.finish` takes the block: it takes in_proj's weight apart."""
    if type(mixer) is not Mamba2 or not mixer.rmsnorm or mixer.context_group is not None:
        return False
    projection = mixer.in_proj
    return type(projection) is nn.Linear and {*map(type, (projection.weight, projection.bias))} <= _TAKEN_APART


def step_layers(layers: Sequence[_Layer], norm_f: nn.Module, residual: Tensor, cache: Sequence[Mamba2Cache],
                seen: bool) -> Tensor:
    """(batch, d_model), embedded tokens, to what norm_f makes of the last layer's. For inference. seen: of `is_seen`."""
    added = None  # to the residual stream, by the layer before
    for layer, its_cache, A in zip(layers, cache, compute_rates(layers), strict=True):
        if not seen and takes_three_launches(layer, residual, its_cache):
            residual, added = _step_in_three(layer, residual if added is None else residual + added, its_cache, A), None
        else:
            residual, normed = add_and_norm(layer.norm, residual, added, seen)
            if seen and has_hooks(layer.mixer):
                rate = {} if A is None else {"A": A}
                added = layer.mixer(normed[:, None], None, its_cache, **rate)[:, 0]
            else:
                added = layer.mixer.step(normed, its_cache, A)
    return add_and_norm(norm_f, residual, added, seen)[1]


def takes_three_launches(layer: _Layer, residual: Tensor, cache: Mamba2Cache) -> bool:
    """Whether a layer is what their kernels take: weights in bf16 as they were made, and few sequences. Not in fp16, which
    gated outputs may exceed before they are normed.
    """
    mixer = layer.mixer
    if len(residual) > MOST or "step" in vars(mixer):  # replaced
        return False
    return has_plain_weights(layer, residual, cache) and not (mixer.rmsnorm and mixer.norm.group_size != mixer.d_ssm and (
        (mixer.norm.group_size or 1) % SHORTEST_GROUP or mixer.d_ssm % mixer.norm.group_size))


def has_plain_weights(layer: _Layer, residual: Tensor, cache: Mamba2Cache) -> bool:
    """Whether a launch takes the norm before a Mamba2 block that has no MLP beside it; its weights are as they were made, in
    bf16 and on one device; nobody wants a gradient; and its gated norm, if there is one, is ours and norms what was gated.
    """
    norm, mixer = layer.norm, layer.mixer
    if not _takes_norm(norm, residual) or type(mixer) is not Mamba2 or mixer.d_inner != mixer.d_ssm:
        return False
    if not type(mixer.in_proj) is type(mixer.out_proj) is nn.Linear or type(mixer.conv1d) is not nn.Conv1d:
        return False
    if mixer.rmsnorm and (type(mixer.norm) is not RMSNormGated or mixer.norm.norm_before_gate or mixer.norm.bias is not None):
        return False
    dtype, linear = mixer.in_proj.weight.dtype, (mixer.in_proj, mixer.conv1d, mixer.out_proj)
    weights = [t for module in linear for t in (module.weight, module.bias) if t is not None]
    if mixer.rmsnorm:
        weights.append(mixer.norm.weight)
    tensors = (*weights, mixer.dt_bias, mixer.A_log, mixer.D, cache.conv_state, cache.ssm_state)
    return (dtype in _DTYPES and norm.weight.dtype == mixer.out_proj.weight.dtype == dtype
            and all(t.is_contiguous() for t in weights) and are_plain(tensors) and not wants_gradient(tensors)
            and all(t.device == residual.device for t in tensors))


def _step_in_three(layer: _Layer, residual: Tensor, cache: Mamba2Cache, A: Tensor | None) -> Tensor:
    """The residual stream with what the layer makes of it."""
    mixer, norm = layer.mixer, layer.norm
    weight, eps, group = (mixer.norm.weight, mixer.norm.eps, mixer.norm.group_size) if mixer.rmsnorm else (None, 0.0, 0)
    with torch.cuda.device_of(residual):
        zxbcdt = project_in(residual, norm.weight, norm.eps, mixer.in_proj.weight, mixer.in_proj.bias, cache.conv_state,
                            mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias, mixer.d_ssm)
        torch.autograd.graph.increment_version(cache.conv_state)
        z, xBC, dt = zxbcdt.split([mixer.d_ssm, cache.conv_state.shape[1], mixer.nheads], -1)
        y = mixer.update_states(xBC, dt, z, cache, A)
        return project_out(y, weight, eps, group, mixer.out_proj.weight, mixer.out_proj.bias, residual)


def add_and_norm(norm: nn.Module, residual: Tensor, added: Tensor | Unscaled | None,
                 seen: bool) -> tuple[Tensor, Tensor]:
    """The residual stream with what is added, and its norm in the dtype of the norm's weight. In inference by one launch.
    added: None for nothing. seen: of `is_seen`.
    """
    if not seen and _takes_norm(norm, residual, added.value if isinstance(added, Unscaled) else added):
        with torch.cuda.device_of(residual):
            return residual_norm(residual, added, norm.weight, norm.eps)
    if isinstance(added, Unscaled):
        added = added.scale()
    residual = residual if added is None else residual + added
    return residual, norm(residual.to(norm.weight.dtype))  # as upstream without `fused_add_norm`; it computes in fp32


def _takes_norm(norm: nn.Module, *stream: Tensor | None) -> bool:
    tensors = (norm.weight, *(t for t in stream if t is not None))
    if any(t.shape != stream[0].shape for t in tensors[1:]) or norm.weight.shape != stream[0].shape[-1:]:
        return False  # torch says so
    if any(torch.promote_types(stream[0].dtype, t.dtype) != stream[0].dtype for t in tensors[1:]):
        return False  # the sum would be in another dtype
    return (type(norm) is nn.RMSNorm and norm.eps is not None and norm.weight.dtype != torch.float64
            and len(norm.weight) <= WIDEST and takes_kernels(stream[0])
            and not wants_gradient(tensors) and are_plain(tensors)
            and all(t.device == norm.weight.device and t.is_contiguous() for t in tensors)
            and not torch.is_autocast_enabled(norm.weight.device.type))
