"""One step of the causal convolution, for decoding: the next tokens of every sequence, and its state moved on in place.

Names, order and meaning are those of the `causal_conv1d` package's `causal_conv1d_update`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.arguments import contiguous
from ..runtime.custom_ops import are_plain, define_inference_op, wants_gradient
from .arguments import check_apart, check_not_negative, check_rows, check_tensor, takes_kernels
from .conv1d import check_filter
from .conv1d import compute_in_torch as convolve
from .kernels.conv1d_update import conv1d_update


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """Convolves the next tokens with those that conv_state keeps, and puts them into it (docs/block.md, equations C9 to C11).

    For inference: a backward through the output raises. Arithmetic, and which tensors take kernels, as in `causal_conv1d_fn`.

    Args:
        x: (batch, dim), one token, or (batch, dim, seqlen). Any strides and any floating dtypes, here and below.
        conv_state: (batch, dim, state_len), state_len >= width - 1, the last tokens of each sequence, the oldest first;
            overwritten, in its own dtype. final_states of `causal_conv1d_fn` is one.
        weight: (dim, width), width 2 to 4.
        bias: (dim,).
        activation: None, "silu" or "swish".
        cache_seqlens: (batch,) int32 or int64, >= 0, the number of tokens that each sequence has had. conv_state is then a
            ring: token t of a sequence is at t % state_len, and nothing is moved. A negative one raises on the CPU alone.
        conv_state_indices: (batch,) int32 or int64, the row of conv_state that belongs to each row of x, each at most once;
            conv_state may then have any number of rows. A negative one marks padding: no state changes and the output is 0.
            An index beyond the last row raises on the CPU, and counts as padding on a GPU, where nobody looks.

    Returns:
        Shape and dtype of x.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is accepted, before conv_state is touched.
    """
    one_token = isinstance(x, Tensor) and x.dim() == 2
    check_filter(x, weight, bias, activation, "(batch, dim)" if one_token else "(batch, dim, seqlen)")
    _check_state(x, conv_state, weight, cache_seqlens, conv_state_indices)
    tensors = (x.unsqueeze(2) if one_token else x, conv_state, weight, bias)
    metadata = (cache_seqlens, conv_state_indices)
    plain = not wants_gradient(tensors) and are_plain((*tensors, *metadata))
    out = (_update if plain else _OP)(*tensors, activation is not None, *metadata)
    return out.squeeze(2) if one_token else out


def compute_in_torch(x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool,
                     cache_seqlens: Tensor | None, conv_state_indices: Tensor | None, out: Tensor) -> None:
    """(C9) to (C11) in torch with the kernel's rounding points."""
    if conv_state_indices is not None:
        live = conv_state_indices >= 0
        rows, part = conv_state[conv_state_indices[live]], torch.empty_like(x[live])
        compute_in_torch(x[live], rows, weight, bias, silu, None if cache_seqlens is None else cache_seqlens[live], None, part)
        conv_state[conv_state_indices[live]] = rows
        out.zero_()[live] = part
        return
    (batch, dim, seqlen), state_len = x.shape, conv_state.shape[2]
    entries = torch.arange(state_len, device=x.device).expand(batch, dim, -1)
    before, after = entries, entries
    if cache_seqlens is not None:
        before, after = ((entries + had[:, None, None]) % state_len for had in (cache_seqlens, cache_seqlens + seqlen))
    history = conv_state.gather(2, before)
    out.copy_(convolve(x, weight, bias, None, history[..., state_len - (weight.shape[1] - 1) :], silu)[0])
    conv_state.scatter_(2, after, torch.cat([history, x.to(history.dtype)], 2)[..., seqlen:])


def _check_state(x, conv_state, weight, cache_seqlens, conv_state_indices) -> None:
    batch, dim = x.shape[:2]
    least = weight.shape[1] - 1
    came = tuple(conv_state.shape) if isinstance(conv_state, Tensor) and conv_state.dim() == 3 else (batch, dim, least)
    check_tensor("conv_state", conv_state, (batch if conv_state_indices is None else came[0], dim, max(came[2], least)), x)
    for name, t in (("cache_seqlens", cache_seqlens), ("conv_state_indices", conv_state_indices)):
        if t is not None:
            check_tensor(name, t, (batch,), x, (torch.int32, torch.int64))
    check_apart("conv_state", conv_state)


def _update(x, conv_state, weight, bias, silu, cache_seqlens, conv_state_indices) -> Tensor:
    check_rows("conv_state_indices", conv_state_indices, "conv_state", len(conv_state))
    check_not_negative("cache_seqlens", cache_seqlens)
    out = torch.empty_like(x)
    with torch.no_grad(), torch.cuda.device_of(x):
        update = conv1d_update if takes_kernels(x) else compute_in_torch
        update(x, conv_state, weight, contiguous(bias), silu, contiguous(cache_seqlens),
               contiguous(conv_state_indices), out)
    torch.autograd.graph.increment_version(conv_state)
    return out


def _update_fake(x, *_):
    return torch.empty_like(x)


_OP = define_inference_op(
    "causal_conv1d_update",
    "(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, bool silu, Tensor? cache_seqlens, "
    "Tensor? conv_state_indices) -> Tensor",
    _update, _update_fake, instead="causal_conv1d_fn")
