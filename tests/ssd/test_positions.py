"""States at positions: those of the sequence cut off there, from the one forward that also gives the outputs."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from ssd import Options, reference, ssd_chunk_scan
from ssd.registry import get_variant
from tests.errors import assert_accurate
from tests.executor import Executor
from tests.fused.hopper_on_cpu import KERNELS, hopper_on_cpu
from tests.inputs import GPU, HALF, OURS, Case, Shape, arguments, gradients, leaves, random_inputs
from tests.refused import assert_refused

pytestmark = pytest.mark.usefixtures("poison")
SHAPE = Shape(2, 1000, 8, 64, 2, 128, 128) if GPU else Shape(2, 70, 2, 16, 1, 16, 16)
EVERY = 2 * SHAPE.chunk_size
CASE = Case(D="h", z=True, dt_bias=True, dt_softplus=True, initial_states=True, documents="seq_idx")
HOPPER = Shape(1, 256, 2, 64, 1, 64, 64)


def scan(inputs, **more):
    return ssd_chunk_scan(**arguments(inputs) | {"return_states_every": EVERY} | more)


def cut(i, tokens):
    names = ("x", "dt", "B", "C", "z", "seq_idx")
    return replace(i, **{name: t[:, :tokens].contiguous() for name in names if (t := getattr(i, name)) is not None})


def assert_right(inputs, variant, every, **more):
    """Each against the sequence that ends there, in fp64 and as variant torch rounds it."""
    out, states = scan(inputs, return_states_every=every, variant=variant, **more)
    assert states.shape == (inputs.batch, inputs.seqlen // every, *inputs.x.shape[2:], inputs.dstate)
    assert states.dtype == inputs.states_dtype
    assert torch.equal(out, ssd_chunk_scan(**arguments(inputs), variant=variant, **more))
    for k, state in enumerate(states.unbind(1)):
        upto = cut(inputs, (k + 1) * every)
        truth = (reference.recurrence if upto.seqlen < 200 else reference.compute_in_fp64)(upto)[1]
        mirror = reference.compute_chunked(upto, reference.Precision(torch.float32, inputs.x.dtype))[1].to(state.dtype)
        assert_accurate("final_states", state, truth, mirror, inputs)


@pytest.mark.parametrize(("case", "dtype", "tokens"), [
    (CASE, torch.float32, None), (replace(CASE, documents=None, state_dtype=torch.float32), HALF, 2 * EVERY)], ids=str)
@pytest.mark.parametrize("variant", (*OURS, "torch"))
def test_variants(variant, case, dtype, tokens, device):
    """With a last position at the end of the sequence, and without."""
    assert_right(random_inputs(replace(SHAPE, seqlen=tokens or SHAPE.seqlen), case, dtype, device), variant, EVERY)


@pytest.mark.skipif(GPU, reason="the interpreter runs the other kernels")
@pytest.mark.parametrize(("variant", "stationary", "every", "more", "dealt"), [
    ("fused", True, 128, {}, {}), ("persistent", True, 128, {}, {}), ("persistent", False, 128, {}, {}),
    ("fused", True, 192, {"seqlen": 190 + 192}, {}),  # no multiple of the scan's segments
    ("persistent", True, 64, {"batch": 2, "seqlen": 129}, {"blocks": 1}),
    ("persistent", True, 128, {"seqlen": 8 * 64, "dstate": 256}, {"blocks": 8, "cut": (3, 2)})], ids=str)
def test_hopper(variant, stationary, every, more, dealt):
    """None are in memory but those that are asked for."""
    inputs = random_inputs(replace(HOPPER, **more), replace(CASE, initial_states=False, documents=None), HALF)
    executor = Executor(*KERNELS)
    for executor.seed in range(2):
        with hopper_on_cpu(executor, **dealt):
            asking = replace(inputs, return_states_every=every)
            saved = get_variant(variant).forward(asking, Options(stationary=stationary), False)[2]
            assert saved.prev_states is None and saved.states.is_contiguous()
            assert_right(inputs, variant, every, options=Options(stationary=stationary))


@pytest.mark.parametrize("variant", (*OURS, "torch", "auto") if GPU else (OURS[0], "auto"))
def test_gradients_stay_as_they_are(variant, device):
    """The states have none; nor do they need states to be kept for the backward."""
    inputs = random_inputs(replace(SHAPE, seqlen=40), CASE, torch.float32, device)
    found = []
    for every in (None, EVERY):
        given = leaves(inputs)
        results = scan(given, return_states_every=every, return_final_states=True, variant=variant,
                       options=Options(save_states=every is None))
        assert every is None or not results[-1].requires_grad
        (results[0].sum() + results[1].sum()).backward()
        found.append(gradients(given))
    assert_close(*found, rtol=1e-5, atol=1e-5)


def test_shorter_sequence(device):
    out, states = scan(random_inputs(replace(SHAPE, seqlen=EVERY - 1), device=device))
    assert out.shape[1] == EVERY - 1 and states.shape[:2] == (2, 0)


def test_sizes_of_numpy():
    np = pytest.importorskip("numpy")
    inputs = random_inputs(Shape(1, 40, 2, 16, 1, 16, 16))
    expected, got = (scan(inputs, chunk_size=kind(16), return_states_every=kind(32), variant="torch")[1]
                     for kind in (int, np.int64))
    assert torch.equal(got, expected)


def test_traced(device):
    """What torch.compile sees has the shapes of what is computed."""
    inputs = random_inputs(SHAPE, CASE, device=device)
    expected = [t.shape for t in scan(inputs)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert [t.shape for t in scan(inputs)] == expected


@pytest.mark.parametrize(("changed", "came", "accepted"), [
    ({"return_states_every": True}, "True", "an int"), ({"return_states_every": 0}, "0", "multiple of chunk_size = 16"),
    ({"return_states_every": 24}, "24", "multiple of chunk_size = 16"),
    ({"cu_seqlens": torch.tensor([0, 40])}, "16 with cu_seqlens", "no cu_seqlens"),
    ({"context_group": "world"}, "16 with context_group", "no context_group"),
    ({"variant": "mamba_ssm"}, "16 with variant 'mamba_ssm'", "a variant of this project")], ids=str)
def test_refusals(changed, came, accepted):
    given = arguments(random_inputs(Shape(1, 40, 2, 16, 1, 16, 16))) | {"return_states_every": 16} | changed
    assert_refused(ssd_chunk_scan, given, "return_states_every", (TypeError, ValueError), came, accepted)
