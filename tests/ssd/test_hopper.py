"""The Gluon kernels: as right as the plain ones wherever they run, and refused with a reason where they do not."""

from dataclasses import replace

import pytest
import torch

from ssd import hopper
from ssd.registry import get_variant
from ssd.types import Options
from tests.errors import assert_forward_right
from tests.inputs import Case, Shape, random_inputs

GPU = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_hopper = pytest.mark.skipif(not GPU, reason="needs a GPU of compute capability 9")
SHAPE = Shape(2, 700, 8, 64, 2, 128, 128)
SHAPES = {
    "ragged": SHAPE,
    "one token": replace(SHAPE, seqlen=1),
    "cut": replace(SHAPE, batch=1, seqlen=4096 + 63, ngroups=1),
    "whole rounds and cut": Shape(3, 520, 192, 64, 1, 128, 256),
    "dstate 64": replace(SHAPE, dstate=64, chunk_size=64),
}
CASES = {
    "plain": Case(),
    "D": Case(D="h", dt_bias=True, dt_softplus=True, initial_states=True),
    "packed": Case(D="h", packed=True, dt_limit=(0.02, 0.08)),
    "strong_decay": Case(strong_decay=True, D="h", initial_states=True, state_dtype=torch.float32),
}
WAYS = {"fused": ("fused", Options()), "stationary": ("persistent", Options()),
        "uncut": ("persistent", Options(segments=False)), "in turn": ("persistent", Options(stationary=False))}


@needs_hopper
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bf16", "fp16"))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("way", WAYS)
def test_right(way, shape, case, dtype):
    variant, options = WAYS[way]
    inputs = random_inputs(SHAPES[shape], CASES[case], dtype, "cuda")
    assert hopper.cannot_run(inputs, options, by_chunk=True) is None
    assert_forward_right(get_variant(variant), inputs, options)


@needs_hopper
@pytest.mark.parametrize("way", WAYS)
def test_same_bits_twice_and_saved_or_not(way):
    variant, options = WAYS[way]
    inputs = random_inputs(SHAPES["whole rounds and cut"], CASES["D"], torch.bfloat16, "cuda")
    first, again = (get_variant(variant).forward(inputs, options, True) for _ in range(2))
    unsaved = get_variant(variant).forward(inputs, options, False)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert torch.equal(first[2].prev_states, again[2].prev_states)
    assert torch.equal(first[0], unsaved[0]) and unsaved[2].prev_states is None


@pytest.mark.parametrize(("case", "shape", "options", "named"), [
    (Case(z=True), SHAPE, Options(), "z"),
    (Case(D="hp"), SHAPE, Options(), "D"),
    (Case(documents="seq_idx"), SHAPE, Options(), "seq_idx"),
    (Case(), replace(SHAPE, headdim=32), Options(), "headdim"),
    (Case(), replace(SHAPE, dstate=100), Options(), "dstate"),
    (Case(), replace(SHAPE, nheads=6), Options(), "heads"),
    (Case(), replace(SHAPE, chunk_size=32), Options(), "chunk_size"),
    (Case(), SHAPE, Options(exp2=False), "exp2"),
    (Case(BC_dtype=torch.float32), SHAPE, Options(), "dtypes"),
])
def test_reasons(case, shape, options, named, monkeypatch):
    monkeypatch.setattr(hopper, "_is_hopper", lambda device: True)
    inputs = random_inputs(replace(shape, seqlen=100), case, torch.float16, "cpu")
    assert named in hopper.cannot_run(inputs, options, by_chunk=True)


def test_elsewhere_the_plain_kernels_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    inputs = random_inputs(replace(SHAPE, seqlen=20), Case(), torch.float16, "cpu")
    assert "compute capability 9" in hopper.cannot_run(inputs, Options(), by_chunk=True)


def test_strides_that_TMA_cannot_describe(monkeypatch):
    monkeypatch.setattr(hopper, "_is_hopper", lambda device: True)
    inputs = random_inputs(replace(SHAPE, seqlen=20), Case(), torch.float16, "cpu")
    assert hopper.cannot_run(inputs, Options(), by_chunk=True) is None
    odd = torch.empty(*inputs.x.shape[:3], 65, dtype=inputs.x.dtype)[..., :64]
    assert "strides" in hopper.cannot_run(replace(inputs, x=odd), Options(), by_chunk=True)
