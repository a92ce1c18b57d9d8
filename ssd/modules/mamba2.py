"""A Mamba-2 block: input projection, causal convolution, SSD, gated RMSNorm, output projection.

Parameters have the names, shapes and meaning of mamba_ssm's `Mamba2`, so that its checkpoints load by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..api import check_flags, check_pair, check_settings, is_real, ssd_chunk_scan, take_int
from ..block.arguments import check_apart, check_dtype, check_floating, check_interpretable, check_size, check_tensor
from ..block.conv1d import WIDTHS, causal_conv1d_fn
from ..block.conv1d_scan_norm import split_xBC
from ..block.conv1d_update import causal_conv1d_update
from ..block.gated_norm import RMSNormGated, rms_norm_gated
from ..block.split_conv1d_scan import split_conv1d_scan
from ..block.state_update import selective_state_update
from ..documents import check_bounds
from ..types import FP32_LARGEST, Options

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NO_LIMIT = (0.0, math.inf)
_FP32_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Mamba2Cache:
    """What a block knows of the tokens so far; `Mamba2.forward` and `Mamba2.step` overwrite it.

    Attributes:
        conv_state: (batch, conv_dim, d_conv - 1), the last inputs of the convolution, the oldest first.
        ssm_state: (batch, nheads, headdim, d_state), fp32 unless `new_cache` was told otherwise.
    """

    conv_state: Tensor
    ssm_state: Tensor


class Mamba2(nn.Module):
    """(batch, seqlen, d_model) to the same shape.

    It has d_inner = expand * d_model channels inside, of which d_ssm = nheads * headdim are the SSD's and the others, if any,
    those of a gated MLP beside it.

    Args:
        d_model: channels in and out.
        d_state, headdim, ngroups, chunk_size: of the SSD, see `ssd.ssd_chunk_scan`.
        d_conv: width of the convolution, 2 to 4.
        expand: d_inner over d_model.
        d_ssm: channels of the SSD, a multiple of headdim; d_inner unless given.
        A_init_range: bounds of -A at the start, positive.
        D_has_hdim: D for each channel, not for each head.
        rmsnorm: a gated norm after the SSD; else a gate alone.
        norm_before_gate: norm(y) silu(z), else norm(y silu(z)).
        dt_min, dt_max, dt_init_floor: the step at the start is drawn between the first two, uniform in its logarithm, and is at
            least the third.
        dt_limit: the step is clamped to it.
        bias, conv_bias: of the two projections, of the convolution.
        conv_init: the filter is drawn from -conv_init to conv_init; as `nn.Conv1d` does it unless given.
        layer_idx: kept, for those who number their layers.
        variant, options: see `ssd.ssd_chunk_scan`.
        context_group: the ranks that a sequence is cut over: u is this rank's part of it. Gradients of parameters are those of
            this part's outputs, for the caller to add up over the group.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is accepted.
    """

    def __init__(self, d_model: int, d_state: int = 128, d_conv: int = 4, conv_init: float | None = None, expand: int = 2,
                 headdim: int = 64, d_ssm: int | None = None, ngroups: int = 1, A_init_range: tuple[float, float] = (1, 16),
                 D_has_hdim: bool = False, rmsnorm: bool = True, norm_before_gate: bool = False, dt_min: float = 0.001,
                 dt_max: float = 0.1, dt_init_floor: float = 1e-4, dt_limit: tuple[float, float] = _NO_LIMIT,
                 bias: bool = False, conv_bias: bool = True, chunk_size: int = 256, layer_idx: int | None = None, device=None,
                 dtype=None, variant: str = "auto", options: Options | None = None,
                 context_group: ProcessGroup | None = None):
        super().__init__()
        made = {"device": device, "dtype": dtype}
        chunk_size = take_int("chunk_size", chunk_size)
        flags = {"D_has_hdim": D_has_hdim, "rmsnorm": rmsnorm, "norm_before_gate": norm_before_gate, "bias": bias,
                 "conv_bias": conv_bias}
        check_settings(chunk_size, flags, dt_limit, None, variant, options)
        if dtype is not None:
            check_floating("dtype", dtype)
        for name, size in {"d_model": d_model, "d_state": d_state, "expand": expand, "headdim": headdim,
                           "ngroups": ngroups}.items():
            check_size(name, size)
        if not isinstance(d_conv, int) or d_conv not in WIDTHS:
            raise ValueError(f"d_conv: got {d_conv!r}, expected an int, one of {WIDTHS}")
        d_inner = expand * d_model
        d_ssm = d_inner if d_ssm is None else d_ssm
        check_size("d_ssm", d_ssm)
        if d_ssm % headdim or d_ssm > d_inner:
            raise ValueError(f"d_ssm: got {d_ssm}, expected a multiple of headdim = {headdim}, "
                             f"at most expand * d_model = {d_inner}")
        nheads = d_ssm // headdim
        if nheads % ngroups:
            raise ValueError(f"ngroups: got {ngroups}, expected a divisor of d_ssm / headdim = {nheads}")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        largest = min(FP32_LARGEST, torch.finfo(dtype).max)
        for name, pair in {"A_init_range": A_init_range, "dt_min, dt_max": (dt_min, dt_max)}.items():
            check_pair(name, pair)
            if not _FP32_SMALLEST <= pair[0] <= pair[1] <= largest:
                raise ValueError(f"{name}: got {tuple(pair)}, expected 0 < min <= max, from {_FP32_SMALLEST:g} to "
                                 f"{largest:g}, which parameters can hold")
        for name, least in {"conv_init": conv_init, "dt_init_floor": dt_init_floor}.items():
            if least is not None and not (is_real(least) and 0 <= least <= largest):
                raise ValueError(f"{name}: got {least!r}, expected a finite number of at least 0")
        self.d_model, self.d_inner, self.d_ssm, self.d_state, self.d_conv = d_model, d_inner, d_ssm, d_state, d_conv
        self.headdim, self.nheads, self.ngroups, self.chunk_size = headdim, nheads, ngroups, chunk_size
        self.D_has_hdim, self.rmsnorm, self.norm_before_gate = D_has_hdim, rmsnorm, norm_before_gate
        self.dt_limit, self.layer_idx, self.variant, self.options = tuple(dt_limit), layer_idx, variant, options
        self.context_group = context_group
        conv_dim = d_ssm + 2 * ngroups * d_state

        self.in_proj = nn.Linear(d_model, 2 * (d_inner - d_ssm) + d_ssm + conv_dim + nheads, bias=bias, **made)
        # for its parameters and their names; the kernels of `ssd.block` convolve
        self.conv1d = nn.Conv1d(conv_dim, conv_dim, d_conv, groups=conv_dim, padding=d_conv - 1, bias=conv_bias, **made)
        if conv_init is not None:
            nn.init.uniform_(self.conv1d.weight, -conv_init, conv_init)
        wide = {"device": device, "dtype": torch.promote_types(torch.get_default_dtype(), torch.float32)}
        steps = torch.empty(nheads, **wide).uniform_(math.log(dt_min), math.log(dt_max)).exp()
        steps = steps.clamp(dt_init_floor, largest)
        self.dt_bias = nn.Parameter((steps + torch.log(-torch.expm1(-steps))).to(dtype))  # softplus of it gives the step
        self.A_log = nn.Parameter(torch.empty(nheads, **wide).uniform_(*A_init_range).log().to(dtype))
        self.D = nn.Parameter(torch.ones(d_ssm if D_has_hdim else nheads, **wide))
        for parameter in (self.dt_bias, self.A_log, self.D):
            parameter._no_weight_decay = True
        if rmsnorm:
            self.norm = RMSNormGated(d_ssm, eps=1e-5, group_size=d_ssm // ngroups, norm_before_gate=norm_before_gate, **made)
        self.out_proj = nn.Linear(d_inner, d_model, bias=bias, **made)

    def forward(self, u: Tensor, seq_idx: Tensor | None = None, cache: Mamba2Cache | None = None,
                cu_seqlens: Tensor | None = None, states: Mamba2Cache | None = None,
                return_states: bool = False, A: Tensor | None = None,
                mask: Tensor | None = None) -> Tensor | tuple[Tensor, Mamba2Cache]:
        """Args:
            u: (batch, seqlen, d_model).
            seq_idx: (batch, seqlen), the document of each token; not with a cache, cu_seqlens, states or return_states.
            cache: the tokens before u, whose place those of u then take. Not for training: its states are overwritten.
            cu_seqlens: (ndocs + 1,), boundaries of the documents that u, batch 1, is packed of: a cache, or states, are then
                those of ndocs sequences. Not with context_group.
            states: the tokens before u, as a cache has them; they are not overwritten, and have gradients. Not with a cache.
            return_states: also return the states after u, with gradients. To train in pieces, detach them.
            A: see `step`.
            mask: of `prefill`, which is then called, with u, cache and A alone.

        Returns:
            (batch, seqlen, d_model); with return_states, a tuple of it and the states.

        Raises:
            TypeError, ValueError: naming the argument, what came and what is accepted, before the cache is touched.
            RuntimeError: torch's, of a projection that was given other sizes; likewise.
        """
        if mask is not None:
            return self.prefill(u, mask, cache, A)
        check_flags({"return_states": return_states})
        self._check(u, ("batch", "seqlen"), A)
        batch, beside = u.shape[0], "that of u"
        if cu_seqlens is not None:
            check_bounds(cu_seqlens, u, u.shape[1])
            batch, beside = len(cu_seqlens) - 1, "the documents of cu_seqlens"
        name, before = ("cache", cache) if states is None else ("states", states)
        if before is not None:
            self.check_cache(before, batch, beside, u.device, name)
        for name, other in (("a cache", cache), ("cu_seqlens", cu_seqlens), ("states", states)):
            if seq_idx is not None and other is not None:
                raise ValueError(f"seq_idx: got a tensor with {name}, expected one of the two: "
                                 "a cache or states go on with one document, or with those of cu_seqlens")
        if cache is not None and states is not None:
            raise ValueError("states: got them with a cache, expected one of the two")
        if return_states and seq_idx is not None:
            raise ValueError("return_states: got True with seq_idx, expected False, or cu_seqlens in place of seq_idx")
        if before is None and not return_states:
            return self._mix(self.in_proj(u), A, seq_idx=seq_idx, cu_seqlens=cu_seqlens)
        given = {}
        if before is not None:
            given = {"initial_states": widen(before.ssm_state), "conv_states": before.conv_state}
        out, ssm_state, conv_state = self._mix(self.in_proj(u), A, cu_seqlens=cu_seqlens, return_final_states=True,
                                               return_conv_states=True, **given)
        if cache is not None:
            cache.ssm_state.copy_(ssm_state.detach())
            cache.conv_state.copy_(conv_state.detach())
        return (out, Mamba2Cache(conv_state, ssm_state)) if return_states else out

    def prefill(self, u: Tensor, mask: Tensor, cache: Mamba2Cache, A: Tensor | None = None) -> Tensor:
        """Prompts of unequal lengths, padded on the left, as `forward` with a cache that has had no token; for inference.

        mask: (batch, seqlen) bool, False for padding, which must be finite, and of which the results are without meaning.
        A: see `step`.
        """
        self._check(u, ("batch", "seqlen"), A)
        self.check_cache(cache, len(u), "that of u", u.device)
        zxbcdt = self.in_proj(u)
        out, ssm_state = self._mix(zxbcdt, A, seq_idx=mask.int(), return_final_states=True)  # padding is a document of its own
        width, start = self.d_conv - 1, 2 * (self.d_inner - self.d_ssm) + self.d_ssm
        last = zxbcdt[:, -width:, start : start + cache.conv_state.shape[1]].masked_fill(~mask[:, -width:, None], 0)
        cache.ssm_state.copy_(ssm_state.detach())
        cache.conv_state.copy_(F.pad(last.mT, (width - last.shape[1], 0)).detach())
        return out

    def finish(self, u: Tensor, cache: Mamba2Cache, A: Tensor | None = None) -> Tensor:
        """What `forward` with a cache gives for the last token of u, (batch, d_model), for inference: gates, norm and output of
        the others are not computed. Of a block with a gated norm, whose in_proj is an nn.Linear. A: see `step`.
        """
        self._check(u, ("batch", "seqlen"), A)
        self.check_cache(cache, len(u), "that of u", u.device)
        d_mlp, weight, bias = self.d_inner - self.d_ssm, self.in_proj.weight, self.in_proj.bias
        gates = 2 * d_mlp + self.d_ssm
        first, rest = (None, None) if bias is None else (bias[:gates], bias[gates:])
        z0, x0, z = F.linear(u[:, -1], weight[:gates], first).split([d_mlp, d_mlp, self.d_ssm], -1)
        xBC, dt = F.linear(u, weight[gates:], rest).split([cache.conv_state.shape[1], self.nheads], -1)
        xBC, conv_state = causal_conv1d_fn(xBC.mT, self.get_filter(), self.conv1d.bias, initial_states=cache.conv_state,
                                           return_final_states=True, activation="silu")
        x, B, C = split_xBC(xBC.mT, self.d_ssm, self.headdim, self.ngroups)
        y, ssm_state = ssd_chunk_scan(
            x, dt, self.get_A() if A is None else A, B, C, self.chunk_size, D=self.get_D(), dt_bias=self.dt_bias,
            initial_states=widen(cache.ssm_state), dt_softplus=True, dt_limit=self.dt_limit, return_final_states=True,
            variant=self.variant, options=self.options)
        cache.ssm_state.copy_(ssm_state.detach())
        cache.conv_state.copy_(conv_state.detach())
        y = self.normalize(y[:, -1].flatten(1), z)
        return self.out_proj(torch.cat([F.silu(z0) * x0, y], -1) if d_mlp else y)

    def _mix(self, zxbcdt: Tensor, A: Tensor | None, **more) -> Tensor | tuple[Tensor, ...]:
        """What follows the input projection. A: of `step`; more: of `split_conv1d_scan`.

        out_proj is called, so that it may be another module, an adapter say, or have hooks; of conv1d and norm the weights are
        taken.
        """
        mixed = split_conv1d_scan(
            zxbcdt, self.get_filter(), self.conv1d.bias, self.dt_bias, self.get_A() if A is None else A, self.get_D(),
            self.chunk_size, dt_limit=self.dt_limit, rmsnorm_weight=self.norm.weight if self.rmsnorm else None,
            rmsnorm_eps=self.norm.eps if self.rmsnorm else None, headdim=None if self.D_has_hdim else self.headdim,
            ngroups=self.ngroups, norm_before_gate=self.norm_before_gate, variant=self.variant, options=self.options,
            context_group=self.context_group, **more)
        if isinstance(mixed, Tensor):
            return self.out_proj(mixed)
        out, *states = mixed
        return self.out_proj(out), *states

    def step(self, u: Tensor, cache: Mamba2Cache, A: Tensor | None = None) -> Tensor:
        """The next token of each sequence, (batch, d_model) to the same shape; for inference.

        A: -exp(A_log), (nheads,) fp32 or fp64, where a model computes it for all of its blocks at once.

        Raises:
            TypeError, ValueError: naming the argument, what came and what is accepted, before the cache is touched.
        """
        self._check(u, ("batch",), A)
        self.check_cache(cache, len(u), "that of u", u.device)
        d_mlp = self.d_inner - self.d_ssm
        z0, x0, z, xBC, dt = self.in_proj(u).split([d_mlp, d_mlp, self.d_ssm, cache.conv_state.shape[1], self.nheads], -1)
        xBC = causal_conv1d_update(xBC, cache.conv_state, self.get_filter(), self.conv1d.bias, activation="silu")
        y = self.update_states(xBC, dt, None if self.rmsnorm else z, cache, A)
        if self.rmsnorm:
            y = self.normalize(y, z)
        return self.out_proj(torch.cat([F.silu(z0) * x0, y], -1) if d_mlp else y)

    def normalize(self, y: Tensor, z: Tensor) -> Tensor:
        """The gated norm of y and its gate z, (..., d_ssm), by the weights of `norm`, which is not called, as in `forward`."""
        return rms_norm_gated(y, self.norm.weight, z=z, eps=self.norm.eps, group_size=self.d_ssm // self.ngroups,
                              norm_before_gate=self.norm_before_gate)

    def update_states(self, xBC: Tensor, dt: Tensor, z: Tensor | None, cache: Mamba2Cache, A: Tensor | None) -> Tensor:
        """The SSD of one token, (batch, d_ssm), gated by z. xBC: after the convolution. A: of `step`."""
        group = self.ngroups * self.d_state
        x, B, C = xBC.split([self.d_ssm, group, group], -1)
        x = x.unflatten(-1, (self.nheads, self.headdim))
        dt_bias, softplus = self.dt_bias, True
        if self.dt_limit != _NO_LIMIT:
            dt, dt_bias, softplus = F.softplus(widen(dt) + widen(dt_bias)).clamp(*self.dt_limit), None, False
        channels, D, A = x.shape[1:], self.get_D(), self.get_A() if A is None else A
        return selective_state_update(
            cache.ssm_state, x, dt[..., None].expand(x.shape), A[:, None, None].expand(*channels, self.d_state),
            B.unflatten(-1, (self.ngroups, self.d_state)), C.unflatten(-1, (self.ngroups, self.d_state)),
            D=D if D.dim() == 2 else D[:, None].expand(channels), z=None if z is None else z.reshape(x.shape),
            dt_bias=None if dt_bias is None else dt_bias[:, None].expand(channels), dt_softplus=softplus).flatten(-2)

    def new_cache(self, batch: int, dtype: torch.dtype | None = None, state_dtype: torch.dtype = torch.float32) -> Mamba2Cache:
        """The cache of sequences that have had no token.

        Args:
            dtype: of the activations, that of the weights unless given.
            state_dtype: of the SSD's states. In fp16 or bf16 a step moves half the bytes, and rounds the states at each token.

        Raises:
            TypeError, ValueError: naming the argument, what came and what is accepted.
        """
        weight = self.conv1d.weight
        dtype = weight.dtype if dtype is None else dtype
        check_size("batch", batch)
        check_floating("dtype", dtype)
        check_floating("state_dtype", state_dtype)
        conv_state, ssm_state = self._list_shapes(batch).values()
        with torch.inference_mode(False):  # what is made in that mode could not be overwritten outside of it
            return Mamba2Cache(weight.new_zeros(conv_state, dtype=dtype), weight.new_zeros(ssm_state, dtype=state_dtype))

    def check_cache(self, cache: object, batch: int, beside: str, device: torch.device | None = None,
                    name: str = "cache") -> None:
        """Refuses what is no cache of this block for so many sequences.

        Args:
            beside: whose number of sequences it is, for the message.
            device: the cache's, where that is to be looked at.
            name: of the argument that the cache came as.

        Raises:
            TypeError, ValueError: naming the argument, what came and what is accepted.
        """
        if not isinstance(cache, Mamba2Cache):
            raise TypeError(f"{name}: got {type(cache).__name__}, expected a Mamba2Cache, as new_cache makes them")
        if self.context_group is not None:
            raise ValueError(f"{name}: got one with context_group, expected none: each rank has a part of the sequence")
        for field, shape in self._list_shapes(batch).items():
            t = getattr(cache, field)
            if not isinstance(t, Tensor):
                raise TypeError(f"{name}.{field}: got {type(t).__name__}, expected a tensor of shape {shape}")
            if t.shape != shape:
                if t.shape[1:] == shape[1:]:
                    raise ValueError(f"{name}: got one of batch {t.shape[0]}, expected batch {batch}, {beside}")
                raise ValueError(f"{name}.{field}: got shape {tuple(t.shape)}, expected {shape} for this block")
            check_dtype(f"{name}.{field}", t)
            check_interpretable(f"{name}.{field}", t)
            if name == "cache":  # it is overwritten
                check_apart(f"{name}.{field}", t)
            if device is not None and t.device != device:
                raise ValueError(f"{name}.{field}: got a tensor on {t.device}, expected {device}, the device of u")

    def _list_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        """Of the tensors of a cache."""
        return {"conv_state": (batch, self.d_ssm + 2 * self.ngroups * self.d_state, self.d_conv - 1),
                "ssm_state": (batch, self.nheads, self.headdim, self.d_state)}

    def _check(self, u: Tensor, axes: tuple[str, ...], A: Tensor | None) -> None:
        """axes: the axes of u before its channels."""
        if not isinstance(u, Tensor):
            raise TypeError(f"u: got {type(u).__name__}, expected a tensor ({', '.join(axes)}, d_model = {self.d_model})")
        if u.dim() != len(axes) + 1 or u.shape[-1] != self.d_model or 0 in u.shape:
            raise ValueError(f"u: got shape {tuple(u.shape)}, expected ({', '.join(axes)}, d_model = {self.d_model}), "
                             "each at least 1")
        in_proj = self.in_proj
        dtype = in_proj.weight.dtype if type(in_proj) is nn.Linear else u.dtype  # else a quantized layer, say
        if u.dtype != dtype and not torch.is_autocast_enabled(u.device.type):
            raise TypeError(f"u: got dtype {u.dtype}, expected {dtype}, that of the weights; or use autocast")
        if A is not None:
            check_tensor("A", A, (self.nheads,), u, beside="u")

    def get_filter(self) -> Tensor:
        """(conv_dim, d_conv)."""
        return self.conv1d.weight.squeeze(1)

    def get_A(self) -> Tensor:
        """(nheads,), in fp32 at least."""
        return -widen(self.A_log).exp()

    def get_D(self) -> Tensor:
        """(nheads,), or (nheads, headdim) with D_has_hdim."""
        return self.D.view(self.nheads, self.headdim) if self.D_has_hdim else self.D


def widen(t: Tensor) -> Tensor:
    """Half precision in fp32; fp32 and fp64 as they are."""
    return t.float() if t.dtype.itemsize < 4 else t
