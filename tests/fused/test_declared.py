"""What a forward gives has the shapes and dtypes that torch.compile is told, whatever it is asked for. Hopper's kernels run in
`tests.executor`, plain ones in Triton's interpreter.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch

from ssd import autograd
from ssd.types import Options
from tests.executor import Executor
from tests.fused.hopper_on_cpu import KERNELS, hopper_on_cpu
from tests.inputs import GPU, Case, Shape, random_inputs

pytestmark = pytest.mark.skipif(GPU, reason="the kernels themselves run on a GPU")
SHAPE = Shape(1, 128, 2, 16, 1, 32, 64)
FORMS = {
    "plain": Case(), "gate": Case(z=True), "documents": Case(documents="seq_idx", initial_states=True),
    "documents with states": Case(documents="states")}


@pytest.fixture(scope="module")
def executor() -> Executor:
    return Executor(*KERNELS)


@pytest.mark.parametrize("chunk_size", (16, 64))
@pytest.mark.parametrize("variant", ("baseline", "fused", "persistent"))
@pytest.mark.parametrize("form", FORMS)
def test_shapes(form, variant, chunk_size, executor):
    """Of each choice of what is kept and asked for: states every so many tokens, and a backward that is to follow."""
    inputs = random_inputs(replace(SHAPE, chunk_size=chunk_size), FORMS[form], torch.float16)
    asked = [None] if form == "documents with states" else [None, *(every for every in (64, 128) if every % chunk_size == 0)]
    for every, save, keep in product(asked, (False, True), (False, True)):
        given = replace(inputs, return_states_every=every)
        args = *given.tensors, *given.settings, variant, autograd.encode(Options(save_states=keep)), save
        with hopper_on_cpu(executor, 2):
            got, declared = autograd.forward(*args), autograd.forward_fake(*args)
        assert [((0,), None) if t is None else (t.shape, t.dtype) for t in got] == [
            (t.shape, t.dtype if t.numel() else None) for t in declared], (every, save, keep)
