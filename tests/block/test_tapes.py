"""The block's functions repeat their launches: their calls can be recorded, and give the same bits from a tape."""

import pytest
import torch

from ssd import tape
from ssd.block import causal_conv1d_fn, rms_norm_gated, selective_scan_fn
from ssd.block.kernels import conv1d_bwd, conv1d_fwd, gated_norm, selective_scan_walk_bwd, selective_scan_walk_fwd
from ssd.kernels import launch as launching
from ssd.kernels import sum_parts, sum_several


def convolution(projection, bias):
    weight = torch.randn(64, 4, device=projection.device, requires_grad=True)
    return lambda x: causal_conv1d_fn(x.mT, weight, bias, activation="silu"), projection[..., 8:72], (weight, bias)


def norm(projection, bias):
    weight, z = torch.randn(64, device=projection.device, requires_grad=True), projection[..., 8:72].detach().requires_grad_()
    return lambda x: rms_norm_gated(x, weight, bias, z), torch.randn_like(z), (weight, bias, z)


def scan(projection, bias):
    leaves = delta, A, B, C = [torch.randn(*size, device=projection.device, requires_grad=True)
                               for size in ((2, 64, 40), (64, 4), (2, 4, 40), (2, 4, 40))]
    return (lambda x: selective_scan_fn(x.mT.contiguous(), delta, -A.exp(), B, C, delta_bias=bias, delta_softplus=True),
            projection[..., 8:72], (*leaves, bias))


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
@pytest.mark.parametrize("part, tapes", ((convolution, 2), (norm, 2), (scan, 3)))
def test_recorded(part, tapes, with_bias, monkeypatch):
    """A forward and a backward, each one tape; the scan's forward is another without gradients. With stand-ins for the GPU."""

    class Compiled:
        function = packed_metadata = None

        def run(self, *args):
            pass

    def launch(kernel, programs, *args, **config):
        if launching._recorded.launches is not None:
            launching._recorded.launches.append((Compiled(), programs, args))

    walks = selective_scan_walk_fwd, selective_scan_walk_bwd, sum_several
    for module in (conv1d_fwd, conv1d_bwd, gated_norm, sum_parts, *walks):
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(tape, "current_stream", lambda: 7)
    monkeypatch.setattr(tape, "empty_strided", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(tape, "_tapes", {})
    monkeypatch.setattr("ssd.block.selective_scan.takes_walk", lambda u, B: True)
    for _ in range(3):
        results(part, "cpu", with_bias)
    assert [type(t) for t in tape._tapes.values()] == [tape.Tape] * tapes


@pytest.mark.gpu
@pytest.mark.parametrize("with_bias", (True, False))
@pytest.mark.parametrize("part", (convolution, norm, scan))
def test_same_bits(part, with_bias, monkeypatch):
    monkeypatch.setattr("ssd.block.selective_scan.takes_walk", lambda u, B: True)

    def run(k: int) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(k)
        return results(part, "cuda", with_bias)

    tape.clear()
    repeated = [run(k) for k in range(4)]
    for k in range(4):
        tape.clear()
        for a, b in zip(repeated[k], run(k), strict=True):
            assert torch.equal(a, b)
