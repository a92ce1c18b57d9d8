"""Calls that a random search once found wrong, each as it was found: kernels that a compiler made wrong, and other causes."""

from dataclasses import replace

import pytest
import torch

from ssd import ssd_chunk_scan
from ssd.registry import get_variant
from ssd.types import Options, SSDInputs
from tests.errors import assert_all_accurate, cotangents, results, truths
from tests.inputs import OURS, Case, Shape, random_inputs

GPU = torch.cuda.is_available()
LIMITED = Case(dt_bias=True, dt_softplus=True, dt_limit=(0.0, 0.1), initial_states=True)
OTHER_STATES = replace(LIMITED, state_dtype=torch.float32)
PACKED = Case(D="h", dt_bias=True, dt_softplus=True, initial_states=True, documents="seq_idx", packed=True)
KEPT_STATES = Case(D="hp", z=True, initial_states=True, state_dtype=torch.bfloat16)
PLAIN_BACKWARD = Options(gluon=False, save_states=False)
FOUND = {
    "wide heads": (Shape(1, 64, 6, 256, 1, 64, 128), PACKED, torch.bfloat16, Options()),
    "a head a group": (Shape(1, 257, 3, 48, 3, 32, 256), LIMITED, torch.bfloat16, Options()),
    "states in fp32": (Shape(1, 257, 3, 48, 3, 32, 256), OTHER_STATES, torch.bfloat16, Options()),
    "one head, states in fp32": (Shape(1, 257, 1, 48, 1, 32, 256), OTHER_STATES, torch.bfloat16, Options()),
    "C in another dtype": (Shape(1, 257, 3, 48, 3, 32, 256), replace(LIMITED, C_dtype=torch.float16), torch.bfloat16,
                           Options()),
    "C B^T from memory": (Shape(1, 256, 72, 12, 6, 42, 256), KEPT_STATES, torch.float16,
                          Options(low_precision_states=False, gluon=False, fuse_bmm=False)),
    "one head": (Shape(1, 257, 1, 48, 1, 32, 256), LIMITED, torch.bfloat16, Options()),
    **{f"a state a channel, {nheads} heads": (Shape(1, seqlen, nheads, 8, 1, 1, 64), Case(packed=True, D=D, dt_softplus=True),
                                              torch.float16, PLAIN_BACKWARD)
       for nheads, seqlen in ((5, 256), (3, 128), (1, 128)) for D in (None, "h")},
}


def assert_right_with(name: str, inputs: SSDInputs, options: Options) -> None:
    ways = cotangents(inputs)
    got = results(get_variant(name), inputs, *ways, options)
    assert_all_accurate(got, truths(inputs, *ways), inputs, *ways)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("found", FOUND)
def test_plain_backward(found, name, device):
    shape, case, dtype, options = FOUND[found]
    assert_right_with(name, random_inputs(shape, case, dtype, device), options)


@pytest.mark.parametrize("name", OURS)
def test_a_document_for_each_token(name, device):
    """One channel: the gradient of a step is a sum over the state alone."""
    dtype = torch.bfloat16 if GPU else torch.float16
    shape = Shape(1, 128 if GPU else 40, 6, 1, 2, 100, 32)
    inputs = random_inputs(shape, Case(D="hp", z=True, state_dtype=torch.float32), dtype, device)
    tokens = torch.arange(shape.seqlen + 1, device=device, dtype=torch.int32)
    assert_right_with(name, replace(inputs, seq_idx=tokens[None, :-1].contiguous(), cu_seqlens=tokens), Options())


@pytest.mark.gpu
@pytest.mark.parametrize("name", (*OURS, "torch"))
def test_one_document_of_one_token_compiled(name, device):
    """The state that is given reaches the document, as without torch.compile."""
    i = random_inputs(Shape(1, 1, 2, 64, 1, 64, 64), Case(initial_states=True), torch.float32, device)
    ends = torch.tensor([0, 1], device=device, dtype=torch.int32)

    def scan(initial_states):
        return ssd_chunk_scan(i.x, i.dt, i.A, i.B, i.C, 64, initial_states=initial_states, cu_seqlens=ends, variant=name)

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(scan)(i.initial_states), scan(i.initial_states))
