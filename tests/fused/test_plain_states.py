"""States of the plain kernels without walks: right in every option, and taken where heads are few and sequences long."""

from dataclasses import replace

import pytest

from fused import plain_states
from ssd.types import Options
from tests.errors import assert_right
from tests.inputs import EVERYTHING, GPU, HALF, Case, Shape, over_variants_in_turn, random_inputs

pytestmark = pytest.mark.usefixtures("poison")
CASES = {"plain": Case(), "everything": EVERYTHING, "varlen": replace(EVERYTHING, documents="varlen"),
         "strong_decay": Case(strong_decay=True, initial_states=True)}
LONG, ROWS = Shape(1, 150, 2, 20, 1, 24, 32), Shape(2, 70, 2, 16, 1, 16, 64)
CALLS = [*((LONG, case) for case in CASES), (ROWS, "everything")]
if GPU:
    SHAPES = Shape(1, 19328, 6, 32, 1, 16, 64), Shape(2, 4096, 4, 64, 2, 128, 256), LONG, ROWS
    CALLS = [(shape, case) for case in CASES for shape in SHAPES if case != "varlen" or shape.batch == 1]


@pytest.mark.parametrize("save", (True, False), ids=("states kept", "computed again"))
@pytest.mark.parametrize(("shape", "case"), CALLS, ids=str)
@over_variants_in_turn
def test_right_without_walks(name, dtype, shape, case, save, device, monkeypatch):
    for where in ("fused.plain_states.should_walk", "fused.forward.should_walk"):
        monkeypatch.setattr(where, lambda i, kernel: False)
    monkeypatch.setattr(plain_states, "dstates_passing", _no_walk)
    monkeypatch.setattr("fused.forward.chunk_state_passing", _no_walk)
    inputs = random_inputs(shape, CASES[case], dtype, device)
    assert_right(name, inputs, options=Options(gluon=False, save_states=save))


@pytest.mark.parametrize(("shape", "chunks", "forward", "backward"), [
    (Shape(1, 19328, 6, 32, 1, 16, 64), 64, False, False),  # peptides-func's 128 graphs: 272 us, 57 in chunks; 375, 116
    (Shape(128, 196, 5, 32, 1, 16, 64), 64, True, True),  # an image's stripes: 13, 17; 14, 17
    (Shape(1, 4096, 48, 64, 1, 128, 64), 64, True, False),  # 50, 82; 128, 88
    (Shape(1, 4096, 24, 64, 1, 128, 256), 256, False, False),  # 43, 20; 121, 53
    (Shape(1, 512, 24, 64, 1, 128, 256), 256, True, False),  # 11, 12; 20, 14
    (Shape(4, 4096, 128, 64, 1, 128, 256), 256, True, True),  # 209, 293; 490, 853
    (Shape(1, 65536, 24, 64, 1, 128, 256), 256, False, True),  # not measured: 0.8 GB of gradients in chunks
], ids=str)
def test_walks_where_it_pays(shape, chunks, forward, backward):
    """As measured on an H200, as long as memory allows."""
    i = random_inputs(replace(shape, batch=1, seqlen=1), Case(), HALF, "cpu")
    i = replace(i, x=i.x.expand(shape.batch, shape.seqlen, -1, -1), chunk_size=chunks)
    assert plain_states.should_walk(i, "chunk_state_passing") is forward
    # in blocks of 64, whatever chunks are
    assert plain_states.should_walk(replace(i, chunk_size=64), "dstates_passing") is backward


def _no_walk(*_):
    raise AssertionError("a walk")
