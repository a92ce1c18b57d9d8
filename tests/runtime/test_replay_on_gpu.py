"""Repeated launches of the operator itself, on a GPU: the same bits as the calls give."""

import pytest
import torch

from ssd import ssd_chunk_scan
from ssd.runtime import replay
from tests.inputs import Case, Shape, random_inputs

pytestmark = pytest.mark.gpu
CASES = {"plain": Case(), "D": Case(D="h", dt_bias=True, dt_softplus=True), "start": Case(D="h", initial_states=True),
         "everything": Case(D="hp", dt_bias=True, dt_softplus=True, initial_states=True, z=True, packed=True)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [Shape(2, 700, 8, 64, 2, 128, 128), Shape(1, 300, 4, 40, 1, 20, 64)], ids=("usual", "odd"))
@pytest.mark.parametrize("variant", ("baseline", "fused", "persistent", "auto"))
def test_same_bits(variant, shape, case, monkeypatch):
    monkeypatch.setattr("fused.split_backward._MOST_BYTES", 0)  # of "auto", which keeps no states

    def run(k: int) -> list[torch.Tensor]:
        torch.manual_seed(k)
        i = random_inputs(shape, CASES[case], torch.bfloat16, "cuda")
        given = {name: t for name, t in vars(i).items() if isinstance(t, torch.Tensor) and name != "cu_seqlens"}
        for t in given.values():
            if t.is_floating_point():
                t += torch.empty_like(t).uniform_(-0.01, 0)  # in place: slices of one projection stay that
        leaves = [t.requires_grad_() for t in given.values() if t.is_floating_point()]
        settings = {name: getattr(i, name) for name in ("chunk_size", "dt_softplus", "dt_limit", "state_dtype")}
        out, final_states = ssd_chunk_scan(**given, **settings, return_final_states=True, variant=variant)
        grads = torch.autograd.grad((out, final_states), leaves, (torch.randn_like(out), torch.randn_like(final_states)))
        with torch.no_grad():
            again = ssd_chunk_scan(**given, **settings, variant=variant)
        return [out.detach(), final_states.detach(), *grads, again]

    first = [run(k) for k in range(4)]
    replay.clear()
    for k in range(4):
        for a, b in zip(first[k], run(k), strict=True):
            assert torch.equal(a, b)
        replay.clear()


def test_recorded():
    """The calls that are to gain are those that can be recorded."""
    i = random_inputs(Shape(2, 700, 8, 64, 2, 128, 128), CASES["D"], torch.bfloat16, "cuda")
    x = i.x.requires_grad_()
    for _ in range(3):
        out = ssd_chunk_scan(x, i.dt, i.A, i.B, i.C, 128, D=i.D, dt_bias=i.dt_bias, dt_softplus=True, variant="persistent")
        torch.autograd.grad(out, x, torch.randn_like(out))
        out.detach().mul_(2)
        with torch.no_grad():
            ssd_chunk_scan(x, i.dt, i.A, i.B, i.C, 128, D=i.D, dt_bias=i.dt_bias, dt_softplus=True, variant="persistent")
    assert [type(t) for t in replay._recordings.values()] == [replay.Recording] * 3


@pytest.mark.parametrize("batch, recordings", [(3, 2), (1, 3)])
def test_halves_are_recorded(batch, recordings, monkeypatch):
    """Each by itself, and of one row the state between them."""
    monkeypatch.setattr("fused.split_backward._MOST_BYTES", 0)
    i = random_inputs(Shape(batch, 700, 8, 64, 2, 128, 128), CASES["D"], torch.bfloat16, "cuda")
    x = i.x.requires_grad_()
    out = ssd_chunk_scan(x, i.dt, i.A, i.B, i.C, 128, D=i.D, dt_bias=i.dt_bias, dt_softplus=True)
    replay.clear()
    for _ in range(4):
        torch.autograd.grad(out, x, torch.randn_like(out), retain_graph=True)
    assert [type(t) for t in replay._recordings.values()].count(replay.Recording) == recordings
