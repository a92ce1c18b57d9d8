"""Documents with states of their own, in and out: each is as if run alone, with every gradient."""

import logging
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from fused import hopper
from ssd import reference, ssd_chunk_scan
from ssd.registry import adapt_to_documents, get_variant
from ssd.types import Options
from tests.errors import assert_right, one_cotangent, results
from tests.executor import Executor
from tests.fused.hopper_on_cpu import KERNELS, hopper_on_cpu
from tests.inputs import GPU, HALF, OURS, Case, Shape, arguments, gradients, leaves, random_inputs, random_like
from tests.refused import assert_refused

pytestmark = pytest.mark.usefixtures("poison")
SHAPE = Shape(1, 700, 8, 64, 2, 128, 128) if GPU else Shape(1, 40, 2, 16, 1, 16, 16)
ALL = Case(D="hp", z=True, dt_bias=True, dt_softplus=True, dt_limit=(0.02, 0.08), initial_states=True, documents="states")
PACKED = Case(D="h", packed=True, dt_softplus=True, initial_states=True, documents="states", state_dtype=torch.float32)
BOUNDS = {"random": None, "long and short": (0, 5, 36, 40), "one token each": range(5), "one document": (0, 40),
          "all empty but one": (0, 0, 0, 40, 40)}


def draw(bounds=None, case=ALL, dtype=torch.float32, device="cpu", shape=SHAPE):
    """Inputs whose documents end there."""
    inputs = random_inputs(shape if bounds is None else replace(shape, seqlen=bounds[-1]), case, dtype, device)
    if bounds is None:
        return inputs
    states = random_like(torch.empty(len(bounds) - 1, *inputs.initial_states.shape[1:], device=device), "states")
    return replace(inputs, cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device=device), initial_states=states)


def scan(inputs, **more):
    """out and final_states by the public function."""
    return ssd_chunk_scan(**arguments(inputs) | {"return_final_states": True} | more)


def run_alone(i):
    """out and final_states, one document after the other, each by the recurrence in fp64."""
    outs, states = [], []
    for d, (start, end) in enumerate(zip(i.cu_seqlens.tolist(), i.cu_seqlens[1:].tolist(), strict=False)):
        state = i.initial_states[d : d + 1]
        if start < end:
            cut = {name: t[:, start:end] for name in ("x", "dt", "B", "C", "z") if (t := getattr(i, name)) is not None}
            out, state = reference.recurrence(replace(i, **cut, cu_seqlens=None, initial_states=state))
            outs.append(out)
        states.append(state)
    return torch.cat(outs, 1), torch.cat(states)


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_reference_is_each_document_alone(bounds):
    """Outputs, and every gradient: against autograd through the recurrence. `torch` runs the same in fp64."""
    small = Shape(1, 75, 2, 3, 1, 4, 16)
    both = [leaves(reference.as_dtype(draw(bounds, dtype=torch.float64, shape=small), torch.float64)) for _ in range(2)]
    found, expected = scan(both[0], variant="torch"), run_alone(both[1])
    assert_close(found, expected)
    for results_of in (found, expected):
        torch.autograd.backward(results_of, [random_like(t, str(t.shape)) for t in results_of])
    assert_close(gradients(both[0]), gradients(both[1]))


@pytest.mark.parametrize(("name", "bounds", "case", "dtype"), [
    *[(name, BOUNDS[bounds], case, dtype) for bounds, case, dtype in (
        ("long and short", PACKED, torch.float32), ("one token each", replace(ALL, D="h"), torch.float32),
        ("one document", PACKED, HALF), ("all empty but one", ALL, HALF)) for name in (OURS if GPU else OURS[:1])],
    *[(name, None, ALL, HALF) for name in OURS]], ids=str)
def test_variants(name, bounds, case, dtype, device):
    """Every variant gets the same rows, so that in the interpreter one takes most of the cases."""
    assert_right(name, draw(bounds, case, dtype, device))


@pytest.mark.skipif(GPU, reason="the interpreter runs the other kernels")
@pytest.mark.parametrize("name", ("fused", "persistent"))
def test_hopper(name, caplog):
    """Its kernels take them, or their rows, which is not said to fail."""
    hopper._say_plain.cache_clear()
    inputs = draw((0, 30, 30, 120), PACKED, HALF, shape=Shape(1, 120, 2, 64, 1, 64, 64))
    with hopper_on_cpu(Executor(*KERNELS)), caplog.at_level(logging.INFO, "ssd"):
        assert_right(name, inputs)
    assert not any("plain Triton" in said for said in caplog.messages)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("chunk_size", (64, 256))
@pytest.mark.parametrize("case", (ALL, PACKED, replace(ALL, strong_decay=True, dt_limit=(0.0, float("inf")))), ids=str)
def test_large(name, chunk_size, case, device):
    assert_right(name, draw(None, case, torch.bfloat16, device, Shape(1, 4097, 16, 64, 8, 128, chunk_size)))


@pytest.mark.parametrize("gradient", ("dout", "dfinal_states"))
def test_one_gradient_alone(gradient, device):
    inputs = replace(draw((0, 7, 7, 20), device=device), initial_states=None)
    assert_right(OURS[0], inputs, *one_cotangent(inputs, gradient))


@pytest.mark.gpu
@pytest.mark.parametrize("name", OURS)
def test_two_runs_are_bit_identical(name, device):
    inputs = draw(dtype=HALF, device=device)
    ways = random_like(inputs.x, "out"), random_like(inputs.initial_states, "states")
    first, second = (results(name, inputs, *ways) for _ in range(2))
    assert all(torch.equal(first[result], second[result]) for result in first)


@pytest.mark.parametrize("variant", (*OURS, "torch") if GPU else ("torch",))
def test_pieces_go_on_where_others_ended(variant, device):
    """Prompts in pieces, each packed with pieces of others: the same outputs, states and gradients as at once."""
    whole = leaves(draw((0, 30, 70), replace(ALL, dt_limit=(0.0, float("inf"))), device=device))
    expected = scan(whole, variant=variant)
    split = leaves(whole)
    outs, states = [], split.initial_states
    for tokens, ends in (((*range(11), *range(30, 61)), (0, 11, 42)), ((*range(11, 30), *range(61, 70)), (0, 19, 28))):
        cut = {name: getattr(split, name)[:, list(tokens)] for name in ("x", "dt", "B", "C", "z")}
        ends = torch.tensor(ends, device=device)
        out, states = scan(replace(split, **cut, cu_seqlens=ends, initial_states=states), variant=variant)
        outs.append(out)
    out = torch.cat([outs[0][:, :11], outs[1][:, :19], outs[0][:, 11:], outs[1][:, 19:]], 1)
    near = 1e-5 if variant == "torch" else 1e-4  # kernels multiply fp32 in three products of TF32
    assert_close((out, states), expected, rtol=near, atol=near)
    for found in ((out, states), expected):
        torch.autograd.backward(found, [random_like(t, str(t.shape)) for t in found])
    assert_close(gradients(split), gradients(whole), rtol=10 * near, atol=10 * near)


def test_what_is_returned(device):
    inputs = draw(device=device)
    ndocs, state = len(inputs.cu_seqlens) - 1, tuple(inputs.initial_states.shape[1:])
    out, final_states, varlen_states = scan(leaves(inputs), return_varlen_states=True)
    assert out.shape == inputs.x.shape and final_states.shape == (ndocs, *state)
    assert final_states.requires_grad and not varlen_states.requires_grad and torch.equal(final_states, varlen_states)
    assert torch.equal(final_states[-1], inputs.initial_states[-1])  # of an empty document
    zeros = scan(replace(inputs, initial_states=torch.zeros_like(inputs.initial_states)))
    assert_close(scan(replace(inputs, initial_states=None)), zeros, rtol=0, atol=0)
    seq_idx = torch.zeros(1, inputs.seqlen, dtype=torch.int32, device=device)
    assert scan(replace(inputs, seq_idx=seq_idx, initial_states=None))[1].shape == (1, *state)  # as mamba_ssm has it


def test_traced(device):
    """What torch.compile sees has the shapes of what is computed."""
    inputs = draw(device=device)
    expected = [t.shape for t in scan(inputs, return_varlen_states=True)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert [t.shape for t in scan(inputs, return_varlen_states=True)] == expected


def test_bounds_beyond_the_row_stay_inside_it(device):
    """On a GPU nobody checks the values; they count as rising from 0 to seqlen."""
    inputs = draw((0, 10, 10, 40), device=device)
    wild = replace(inputs, cu_seqlens=torch.tensor([3, 10, -4, 99], dtype=torch.int32, device=device))
    for variant in map(get_variant, ("torch", OURS[0])):
        found, expected = (adapt_to_documents(variant, i).forward(i, Options(), False)[:2] for i in (wild, inputs))
        assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("changed", "argument", "came", "accepted"), [
    (lambda i: {"initial_states": i.initial_states[:1]}, "initial_states", "(1, 2, 16, 16)", "(3, 2, 16, 16)"),
    (lambda i: {"seq_idx": torch.zeros(1, 40, dtype=torch.int32), "cu_seqlens": None}, "initial_states", "(3, 2, 16, 16)",
     "with cu_seqlens alone (ndocs, nheads, headdim, dstate)"),
    (lambda i: {"seq_idx": torch.zeros(1, 40, dtype=torch.int32)}, "initial_states", "(3, 2, 16, 16)", "cu_seqlens alone"),
    (lambda i: {"cu_seqlens": torch.tensor([0, 20, 10, 40])}, "cu_seqlens", "[0, 20, 10, 40]", "rising"),
    (lambda i: {"cu_seqlens": torch.tensor([0, 20, 30, 41])}, "cu_seqlens", "[0, 20, 30, 41]", "from 0 to seqlen = 40"),
], ids=range(5))
def test_refusals(changed, argument, came, accepted):
    inputs = draw((0, 10, 10, 40), shape=Shape(1, 40, 2, 16, 1, 16, 16))
    given = arguments(inputs) | {"return_final_states": True} | changed(inputs)
    assert_refused(ssd_chunk_scan, given, argument, ValueError, came, accepted)
