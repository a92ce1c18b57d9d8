"""A Mamba-1 block (arXiv:2312.00752, section 3.4) on this repository's kernels, with one-token steps, to be timed."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssd.block import causal_conv1d_update, mamba_inner_fn, selective_state_update
from ssd.modules import Mamba2Cache

from ..workloads.mamba1 import draw_step_bias


class Mamba1(nn.Module):
    """(batch, seqlen, d_model) to the same shape; twice as wide inside. Parameters are called as in mamba_ssm's `Mamba`."""

    def __init__(self, d_model: int, d_state: int = 16, d_conv: int = 4, device=None, dtype: torch.dtype | None = None):
        super().__init__()
        inner, rank, made = 2 * d_model, -(-d_model // 16), {"device": device, "dtype": dtype}
        self.d_state = d_state
        self.in_proj = nn.Linear(d_model, 2 * inner, bias=False, **made)
        self.conv1d = nn.Conv1d(inner, inner, d_conv, groups=inner, padding=d_conv - 1, **made)
        self.x_proj = nn.Linear(inner, rank + 2 * d_state, bias=False, **made)
        self.dt_proj = nn.Linear(rank, inner, **made)
        self.dt_proj.bias = nn.Parameter(draw_step_bias(inner).to(**made))
        self.A_log = nn.Parameter(torch.arange(1.0, d_state + 1, device=device).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner, device=device))
        self.out_proj = nn.Linear(inner, d_model, bias=False, **made)

    def forward(self, u: Tensor) -> Tensor:
        return mamba_inner_fn(self.in_proj(u).mT, self.conv1d.weight, self.conv1d.bias, self.x_proj.weight, self.dt_proj.weight,
                              self.out_proj.weight, None, -self.A_log.exp(), D=self.D, delta_bias=self.dt_proj.bias)

    def step(self, u: Tensor, cache: Mamba2Cache) -> Tensor:
        """The next token of each sequence, (batch, d_model) to the same shape; for inference."""
        x, z = self.in_proj(u).chunk(2, -1)
        x = causal_conv1d_update(x.contiguous(), cache.conv_state, self.conv1d.weight.squeeze(1), self.conv1d.bias, "silu")
        dt, B, C = self.x_proj(x).split([self.dt_proj.in_features, self.d_state, self.d_state], -1)
        y = selective_state_update(cache.ssm_state, x, F.linear(dt, self.dt_proj.weight), -self.A_log.exp(), B, C, self.D, z,
                                   self.dt_proj.bias, True)
        return self.out_proj(y)

    def new_cache(self, batch: int) -> Mamba2Cache:
        weight = self.conv1d.weight
        return Mamba2Cache(weight.new_zeros(batch, weight.shape[0], weight.shape[2] - 1),
                           weight.new_zeros(batch, *self.A_log.shape, dtype=torch.float32))
