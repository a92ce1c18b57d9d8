"""The references judge everything else, so they are judged here: against the recurrence, autograd and themselves."""

from dataclasses import fields, replace

import pytest
import torch
from torch.testing import assert_close

from ssd import reference
from ssd.registry import get_variant
from ssd.types import Options, SSDGrads
from tests import errors
from tests.inputs import EVERYTHING, PLAIN, Case, Shape, every_option_pairwise, gradients, leaves, random_inputs, random_like

CASES = [*every_option_pairwise(), EVERYTHING, Case(strong_decay=True, D="h", initial_states=True)]
FP64 = torch.float64


def inputs64(shape, case):
    return reference.as_dtype(random_inputs(shape, case, FP64), FP64)


def make_one_row(shape, case):
    return replace(shape, batch=1) if case.documents == "varlen" else shape


def cotangents(inputs):
    out, final_states = reference.compute_in_fp64(inputs)
    return random_like(out, "out"), random_like(final_states, "final_states")


def by_name(grads: SSDGrads) -> dict:
    return {f.name[1:]: t for f in fields(grads) if (t := getattr(grads, f.name)) is not None}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("shape", [Shape(2, 37, 4, 3, 2, 5, 16), Shape(1, 32, 2, 4, 1, 3, 16), Shape(2, 1, 2, 3, 1, 2, 16),
                                   Shape(1, 40, 3, 2, 3, 4, 64)], ids=str)
def test_chunked_form_is_the_recurrence(shape, case):
    """Outputs, and gradients: those derived in docs/ssd.md against autograd through the recurrence."""
    inputs = leaves(inputs64(make_one_row(shape, case), case))
    dout, dfinal_states = cotangents(inputs)
    out, final_states = reference.recurrence(inputs)
    with torch.no_grad():
        assert_close(reference.compute_in_fp64(inputs), (out, final_states))
        derived = by_name(reference.compute_grads_in_fp64(inputs, dout, dfinal_states))
    torch.autograd.backward((out, final_states), (dout, dfinal_states))
    assert_close(derived, gradients(inputs))


def test_recurrence_is_the_sum_over_pairs():
    """y_i = sum over j <= i of (C_i . B_j) exp(A (dt_{j+1} + ... + dt_i)) dt_j x_j, written out for one head."""
    i = inputs64(Shape(1, 9, 1, 2, 1, 3), Case(D="h", z=True))
    x, dt, B, C = i.x[0, :, 0], i.dt[0, :, 0].clamp(min=0), i.B[0, :, 0], i.C[0, :, 0]
    y = torch.stack([
        sum((C[t] @ B[s]) * torch.exp(i.A[0] * dt[s + 1 : t + 1].sum()) * dt[s] * x[s] for s in range(t + 1)) + i.D[0] * x[t]
        for t in range(9)
    ])
    assert_close(reference.recurrence(i)[0][0, :, 0], y * i.z[0, :, 0] * i.z[0, :, 0].sigmoid())


def test_documents_of_a_row_are_as_if_run_apart():
    """Outputs, states and gradients; the judge knows no documents."""
    inputs = inputs64(Shape(1, 75, 4, 3, 2, 5, 16), Case(D="hp", z=True, dt_bias=True, dt_softplus=True, documents="varlen"))
    ways = cotangents(inputs)
    assert_close(errors.truths(inputs, *ways), errors.truths_apart(inputs, inputs.cu_seqlens.tolist(), *ways))


def test_initial_states_reach_a_leading_document_0_alone():
    inputs = inputs64(Shape(1, 40, 2, 3, 1, 5, 16), Case(initial_states=True, documents="seq_idx"))
    first = int((inputs.seq_idx == 0).sum())
    assert 0 < first < 40
    changed = replace(inputs, initial_states=inputs.initial_states + 1)
    for run in (reference.compute_in_fp64, reference.recurrence):
        moved = (run(changed)[0] != run(inputs)[0]).any(-1).any(-1)[0]
        assert moved[:first].all() and not moved[first:].any()
        late = replace(changed, seq_idx=inputs.seq_idx + 1)
        assert_close(run(late), run(replace(late, initial_states=None)))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_mirror_rounds_where_the_kernels_do(dtype):
    """Its error is that of the dtype: neither that of fp32, nor what rounding the decay as well would give."""
    inputs = random_inputs(Shape(1, 200, 4, 16, 1, 16, 64), PLAIN, dtype)
    out, final_states, _ = get_variant("torch").forward(inputs, Options(), True)
    eps = torch.finfo(dtype).eps
    for value, truth in zip((out, final_states), reference.compute_in_fp64(inputs), strict=True):
        assert eps / 10 < (value - truth).norm() / truth.norm() < eps


def test_strong_decay_stays_finite_and_forgets():
    inputs = random_inputs(Shape(1, 256, 2, 4, 1, 4, 64), Case(strong_decay=True, initial_states=True))
    assert (inputs.dt * -inputs.A)[0, :64].sum(0).min() > 100
    out, final_states, saved = get_variant("torch").forward(inputs, Options(), True)
    grads = get_variant("torch").backward(saved, torch.ones_like(out), None, SSDGrads())
    assert all(t.isfinite().all() for t in (out, final_states, *by_name(grads).values()))
    forgotten = replace(inputs, initial_states=None)
    assert_close(reference.compute_in_fp64(forgotten)[1], final_states.double(), rtol=1e-5, atol=1e-6)
