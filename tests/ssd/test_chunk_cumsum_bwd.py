"""Sums over all chunks that the last program to arrive adds up."""

from dataclasses import replace

import pytest
import torch

from ssd.kernels.chunk_cumsum import chunk_cumsum
from ssd.kernels.chunk_cumsum_bwd import chunk_cumsum_bwd
from tests.inputs import Case, Shape, random_inputs

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize("batch, seqlen", [(1, 16), (2, 40), (1, 2100)])
@pytest.mark.parametrize("bias, D", [(False, False), (True, False), (False, True), (True, True)])
def test_sums(batch, seqlen, bias, D, device):
    """Of one part, of fewer than are read at a time and of more. As often as it is launched, the bits are the same."""
    i = random_inputs(Shape(batch, seqlen, 11, 16, 1, 16, 16), Case(dt_bias=bias), torch.float32, device)
    i = replace(i, dt=i.dt.abs())
    arrivals = torch.full((i.nheads,), 77, dtype=torch.int32, device=device)
    dt, _ = chunk_cumsum(i, arrivals=arrivals)
    inside = torch.arange(dt[0, 0].numel(), device=device).view_as(dt[0, 0]) < seqlen
    u_v_x, row, dy_x = (torch.randn_like(dt) * inside for _ in range(3))
    none, s = dt.new_empty(0, *dt.shape), torch.zeros(*dt.shape[:3], 1, device=device)

    def run() -> tuple:
        return chunk_cumsum_bwd(i, u_v_x, none, torch.zeros_like(dt), s, row, none, arrivals, None, dy_x if D else None)

    ddt, dA, ddt_bias, dD = run()
    da = row.double().flip(-1).cumsum(-1).flip(-1)
    torch.testing.assert_close(dA.double(), (da * dt).sum((0, 2, 3)), rtol=1e-5, atol=1e-5 * seqlen**0.5)
    for got, wanted, expected in ((ddt_bias, bias, ddt.double().sum((0, 1))), (dD, D, dy_x.double().sum((0, 2, 3)))):
        if wanted:
            torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5 * seqlen**0.5)
        else:
            assert got is None
    for again, before in zip(run(), (ddt, dA, ddt_bias, dD), strict=True):
        assert before is None or torch.equal(again, before)
