"""The backward in two halves: right, to the gradients' own places, and only where it is worth it."""

from dataclasses import replace

import pytest
import torch

from fused import split_backward as halves
from ssd import ssd_chunk_scan
from ssd.registry import get_variant
from ssd.types import SUB_CHUNK, Options, SSDSaved
from tests.errors import assert_lands, assert_right
from tests.inputs import GPU, HALF, Case, Shape, over_variants_in_turn, random_inputs

pytestmark = pytest.mark.usefixtures("poison")
RECOMPUTED = Options(save_states=False)
EVERYTHING = Case(D="hp", dt_bias=True, dt_softplus=True, initial_states=True, z=True, packed=True)
CASES = {"plain": Case(), "usual": Case(D="h", dt_bias=True, dt_softplus=True), "everything": EVERYTHING}
SHAPES = [Shape(1, 130, 2, 20, 1, 24, 32), Shape(3, 70, 1, 16, 1, 16, 64)]
if GPU:
    SHAPES = [Shape(2, 4096, 8, 64, 2, 128, 256), Shape(1, 1000, 8, 64, 1, 64, 128), *SHAPES]


@pytest.fixture
def small(monkeypatch):
    """No states are too few to be halved; how often is counted."""
    monkeypatch.setattr(halves, "_MOST_BYTES", 0)
    calls = []
    run_in_halves = halves.run_in_halves
    monkeypatch.setattr("fused.backward.run_in_halves", lambda *args: calls.append(args) or run_in_halves(*args))
    return calls


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@over_variants_in_turn
def test_right(name, dtype, shape, case, device, small):
    inputs = random_inputs(shape, CASES[case], dtype, device)
    assert_right(name, inputs, options=RECOMPUTED)
    assert small


@pytest.mark.parametrize("name", ("baseline", "fused", "persistent"))
@pytest.mark.parametrize("gate", (False, True))
def test_what_is_kept_to_compute_states_again(name, gate, device):
    """What came, and y where a gate needs it: no more than upstream, which keeps dt and dA_cumsum besides."""
    i = random_inputs(SHAPES[0], replace(CASES["usual"], z=gate, initial_states=True), HALF, device)
    given = {name: getattr(i, name) for name in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")}
    given = {name: t.requires_grad_() for name, t in given.items() if t is not None}
    out = ssd_chunk_scan(**given, chunk_size=i.chunk_size, dt_softplus=True, variant=name, options=RECOMPUTED)
    came = {t.untyped_storage().data_ptr() for t in given.values()}
    kept = [t for t in out.grad_fn.saved_tensors if t is not None and t.untyped_storage().data_ptr() not in came]
    assert [t.shape for t in kept] == [out.shape] * gate


@pytest.mark.parametrize("name", ("fused", "persistent"))
def test_switched_off(name, device, small):
    inputs = random_inputs(SHAPES[-1], CASES["usual"], HALF, device)
    assert_right(name, inputs, options=replace(RECOMPUTED, split_backward=False))
    assert not small


@pytest.mark.parametrize("begins", [(30, 90), (128,), (127, 128, 129), (126,), (129,), (), (0, 128)], ids=str)
def test_documents_of_one_row(begins, device, small):
    """The second half begins at token 128, within a document or with one; initial_states reach document 0 alone, if at all."""
    shape, case = Shape(1, 130, 2, 64, 1, 64, 64) if GPU else Shape(1, 130, 2, 16, 1, 16, 32), replace(EVERYTHING, D="h")
    inputs = random_inputs(shape, replace(case, documents="seq_idx"), HALF if GPU else torch.float32, device)
    token = torch.arange(130, device=device)
    documents = torch.stack([token * 0, *(token >= begin for begin in begins)]).sum(0)
    inputs = replace(inputs, seq_idx=documents[None].to(torch.int32))
    names = ("fused", "persistent") if GPU else ("fused",)  # whose backwards are the same kernels
    for name in names:
        assert_right(name, inputs, options=RECOMPUTED)
    assert len(small) == len(names)


def test_documents_and_the_states_at_their_ends(device, small):
    """What only the forward computes."""
    inputs = random_inputs(Shape(1, 130, 2, 16, 1, 16, 32), replace(EVERYTHING, documents="varlen"), torch.float32, device)
    assert_right("fused", inputs, options=RECOMPUTED)
    assert small


@pytest.mark.parametrize("batch, seqlen", [(1, 130), (2, 65)])
def test_into_places(batch, seqlen, device, small):
    """Slices of packed gradients get the bits that fresh memory gets."""
    inputs = random_inputs(Shape(batch, seqlen, 2, 16, 1, 16, 32), EVERYTHING, HALF, device)
    places = {name: torch.full((*t.shape[:-1], 3, t.shape[-1]), float("nan"), dtype=t.dtype, device=device)[..., 1, :]
              for name in ("dx", "ddt", "dB", "dC", "dz", "dinitial_states") for t in [getattr(inputs, name[1:])]}
    assert_lands(get_variant("fused"), inputs, places, RECOMPUTED)
    assert len(small) == 2


@pytest.mark.parametrize("worth, change", [
    (True, {}), (False, {"kept": True}), (True, {"documents": "seq_idx"}), (True, {"documents": "seq_idx", "batch": 2}),
    (False, {"seqlen": 127}), (True, {"seqlen": 127, "batch": 2}), (False, {"large": 1 << 40}),
])
def test_where_it_is_worth_it(worth, change, monkeypatch):
    monkeypatch.setattr(halves, "_MOST_BYTES", change.get("large", 0))
    shape = Shape(change.get("batch", 1), change.get("seqlen", 128), 2, 16, 1, 16, 32)
    inputs = random_inputs(shape, Case(documents=change.get("documents")))
    saved = SSDSaved(inputs, RECOMPUTED)
    if "kept" in change:
        saved = replace(saved, prev_states=torch.empty(1, 4, 2, 16, 16))
    assert halves.should_split(saved, SUB_CHUNK) == worth
