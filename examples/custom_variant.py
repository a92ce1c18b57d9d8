"""Add an implementation of the operator in 30 lines: the sequential recurrence, with the backward of the variant "torch"."""

import torch
import torch.nn.functional as F

import ssd
from ssd.registry import Variant, add_variant
from ssd.types import SSDSaved


def supports(inputs):
    """None, or the reason why this variant cannot run the inputs."""
    plain = all(t is None for t in (inputs.z, inputs.seq_idx, inputs.cu_seqlens, inputs.initial_states))
    return None if plain else "it takes no z, no documents and no initial states"


def forward(inputs, options, save):
    """(out, final_states, what the backward needs): h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t,  y_t = C_t h_t + D x_t."""
    x, B, C = (t.float() for t in (inputs.x, inputs.B, inputs.C))
    dt = inputs.dt.float() + (0 if inputs.dt_bias is None else inputs.dt_bias)
    dt = (F.softplus(dt) if inputs.dt_softplus else dt).clamp(*inputs.dt_limit)
    B, C = (t.repeat_interleave(x.shape[2] // t.shape[2], dim=2) for t in (B, C))  # heads share their group's
    h, y = x.new_zeros(*x.shape[:1], *x.shape[2:], B.shape[3]), []  # batch, nheads, headdim, dstate
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t] * inputs.A)[..., None, None]
        h = decay * h + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        y.append((h * C[:, t, :, None]).sum(-1))
    out = torch.stack(y, 1) + (0 if inputs.D is None else x * inputs.D.reshape(x.shape[2], -1))
    return out.to(inputs.x.dtype), h, SSDSaved(inputs, options, None, None)


VARIANT = Variant("recurrence", supports=supports, forward=forward, backward=ssd.get_variant("torch").backward)

if __name__ == "__main__":
    add_variant(VARIANT)
    torch.manual_seed(0)
    x = torch.randn(2, 100, 4, 16, requires_grad=True)
    B, C = torch.randn(2, 2, 100, 2, 8)
    dt, A, D = torch.rand(2, 100, 4) * 0.1, -torch.rand(4) * 16, torch.ones(4)
    results = {}
    for name in ("torch", "recurrence"):
        y = ssd.ssd_chunk_scan(x, dt, A, B, C, chunk_size=32, D=D, variant=name)
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        results[name] = y, gradient
    for what, ours, theirs in zip(("y", "dx"), results["recurrence"], results["torch"], strict=True):
        print(f"{what}: largest difference {(ours - theirs).abs().max().item():.1e}")
