"""A scan that leaves the factor of its gated norm to what comes later: in the executor, or on a Hopper GPU."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from ssd.reference import compute_in_fp64
from ssd.registry import get_variant
from ssd.types import Options
from tests.errors import error
from tests.executor import Executor
from tests.fused import test_hopper
from tests.fused.hopper_on_cpu import KERNELS, hopper_on_cpu
from tests.inputs import GPU, Case, Shape, random_inputs

pytestmark = [pytest.mark.skipif(GPU and not test_hopper.GPU, reason="needs a GPU of compute capability 9, or none"),
              pytest.mark.usefixtures("poison")]
GATE = Case(D="h", dt_bias=True, dt_softplus=True, initial_states=True, z=True, dt_dtype=torch.float32)
PERSISTENT = get_variant("persistent")
SHAPES = {  # batch, seqlen, nheads, headdim, ngroups, dstate, chunk_size; and a cut of each sequence
    "ragged": (Shape(2, 150, 4, 64, 2, 64, 128), None),
    "cut": (Shape(1, 9 * 64 + 22, 4, 64, 1, 128, 64), (3, 2)),
    "odd heads, headdim 48": (Shape(1, 150, 3, 48, 1, 128, 128), None),
    "headdim 80": (Shape(1, 150, 2, 80, 1, 80, 128), None),
    "headdim 128": (Shape(1, 100, 2, 128, 1, 128, 128), None),
}


@pytest.fixture(scope="module")
def executor():
    return None if GPU else Executor(*KERNELS)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("case", (GATE, replace(GATE, initial_states=False, packed=True)), ids=("states", "packed"))
def test_the_norm_is_finished_later(name, case, device, executor):
    shape, cut = SHAPES[name]
    i = random_inputs(shape, case, torch.bfloat16, device)
    weight = torch.randn(i.x.shape[2:], device=device).to(torch.bfloat16)
    with nullcontext() if GPU else hopper_on_cpu(executor, blocks=5, cut=cut):
        assert PERSISTENT.explain_no_deferred_norm(i, Options()) is None
        out, final_states, sums = PERSISTENT.scan_deferring_norm(i, Options(), weight)
    truth, true_states = compute_in_fp64(i)
    assert error(out, truth * weight.double()).rms < 4e-3
    assert error(final_states, true_states).rms < 4e-3
    assert sums.shape[::2] == (i.batch, i.nheads * -(-i.headdim // 64)) and sums.shape[1] >= i.seqlen
    mean = sums[:, : i.seqlen].sum(2) / (i.nheads * i.headdim)
    torch.testing.assert_close(mean.double(), truth.square().mean((2, 3)), rtol=2e-2, atol=0)


@pytest.mark.parametrize(("change", "reason"), (
    (lambda i: replace(i, x=i.x.half(), B=i.B.half(), C=i.C.half()), "float16"),
    (lambda i: replace(i, B=i.B.repeat(1, 1, 1, 4), C=i.C.repeat(1, 1, 1, 4)), "dstate: got 256, takes up to 128")),
    ids=("fp16", "dstate"))
def test_what_it_does_not_take(change, reason, device, executor):
    i = random_inputs(Shape(1, 100, 2, 64, 1, 64, 128), GATE, torch.bfloat16, device)
    with nullcontext() if GPU else hopper_on_cpu(executor):
        assert PERSISTENT.explain_no_deferred_norm(i, Options()) is None
        assert reason in PERSISTENT.explain_no_deferred_norm(change(i), Options())
        assert "stationary" in PERSISTENT.explain_no_deferred_norm(i, Options(stationary=False))
