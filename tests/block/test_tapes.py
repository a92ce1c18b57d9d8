"""The block's functions repeat their launches: their calls can be recorded, and give the same bits from a replay."""

import pytest
import torch

from ssd.block import causal_conv1d_fn, rms_norm_gated, selective_scan_fn
from ssd.block.kernels import conv1d_bwd, conv1d_fwd, gated_norm, selective_scan_walk_bwd, selective_scan_walk_fwd
from ssd.kernels import sum_parts, sum_several
from ssd.runtime import launch as launching
from ssd.runtime import replay


def convolution(projection, bias):
    weight = torch.randn(64, 4, device=projection.device, requires_grad=True)
    return lambda x: causal_conv1d_fn(x.mT, weight, bias, activation="silu"), projection[..., 8:72], (weight, bias)


def norm(projection, bias):
    weight, z = torch.randn(64, device=projection.device, requires_grad=True), projection[..., 8:72].detach().requires_grad_()
    return lambda x: rms_norm_gated(x, weight, bias, z), torch.randn_like(z), (weight, bias, z)


def scan(projection, bias):
    """By the walk, between projections: delta, B, C and the gradient of its result have their tokens apart."""
    delta = projection[..., 8:72].mT.contiguous().requires_grad_()
    A = -torch.rand(40, 4, device=projection.device, requires_grad=True)
    BC, D = torch.randn(2, 64, 8, device=projection.device, requires_grad=True), None if bias is None else bias[:40]
    weight = torch.randn(40, 8, device=projection.device)
    return (lambda x: selective_scan_fn(x, delta.mT, A, *BC.mT.chunk(2, 1), D).mT @ weight, projection[..., 8:72],
            (delta, A, BC, bias))


@pytest.fixture(autouse=True)
def _walks(monkeypatch):
    monkeypatch.setattr("ssd.block.selective_scan.takes_walk", lambda u, B: True)


def results(part, device, with_bias):
    """out and the gradients of a part that reads a slice of a projection."""
    projection = torch.randn(2, 40, 80, device=device)
    function, x, others = part(projection, torch.randn(64, device=device, requires_grad=True) if with_bias else None)
    x = x.detach().requires_grad_()
    with torch.no_grad():
        again = function(x)
    out = function(x)
    return again, out.detach(), *torch.autograd.grad(out, (x, *(t for t in others if t is not None)), torch.randn_like(out))


@pytest.mark.parametrize("with_bias", (True, False))
@pytest.mark.parametrize("part", (convolution, norm, scan))
def test_recorded(part, with_bias, monkeypatch):
    """A forward and a backward, each one tape; with stand-ins for Triton and the GPU."""

    class Compiled:
        function = packed_metadata = None

        def run(self, *args):
            pass

    def launch(kernel, programs, *args, **config):
        if launching._recorded.launches is not None:
            launching._recorded.launches.append((Compiled(), programs, args))

    for module in (conv1d_fwd, conv1d_bwd, gated_norm, selective_scan_walk_fwd, selective_scan_walk_bwd, sum_parts,
                   sum_several):
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(replay, "get_current_stream", lambda device: 7)
    monkeypatch.setattr(replay, "empty_strided", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(replay, "_recordings", {})
    for _ in range(3):
        results(part, "cpu", with_bias)
    tapes = 3 if part is scan else 2  # whose forward keeps states only for a backward
    assert [type(t) for t in replay._recordings.values()] == [replay.Recording] * tapes
