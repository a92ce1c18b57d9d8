"""Documents with states in the Hopper kernels as they are, in `tests.executor`; and the blocks that they are walked in.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, product
from unittest.mock import patch

import pytest
import torch

from ssd import autograd
from ssd.documents import find_bounds
from ssd.kernels.document_blocks import document_blocks
from ssd.registry import get_variant
from ssd.types import Options, SSDGrads
from tests.errors import assert_all_accurate, cotangents, one_cotangent, results, truths
from tests.executor import Executor, language
from tests.executor.copies import Descriptor
from tests.executor.language import PREFETCH, prefetch
from tests.fused.hopper_on_cpu import KERNELS, hopper_on_cpu
from tests.fused.test_hopper import over_forms_of_states
from tests.inputs import GPU, Case, Shape
from tests.ssd.test_document_states import draw

pytestmark = pytest.mark.usefixtures("poison")
SHAPE = Shape(1, 300, 4, 64, 2, 64, 64)
CASE = Case(D="h", dt_bias=True, dt_softplus=True, initial_states=True, documents="states", dt_dtype=torch.float32)
BOUNDS = (0, 30, 30, 95, 96, 224, 300)
SCAN, STATES, GROUP = "hopper_scan_kernel", "hopper_states_kernel", "hopper_group_kernel"
PIECES = "hopper_pieces_kernel"
WHOLE, CUT = (SCAN, STATES, GROUP), (PIECES, SCAN, PIECES, STATES, GROUP)
TWO_PARTS = SCAN, SCAN, STATES, GROUP, GROUP
GATE, PLAIN_BACKWARD = replace(CASE, z=True), Options(fuse_backward=False)
WAYS = {
    "several rounds": (BOUNDS, CASE, {}, WHOLE, {"blocks": 1}),
    "cut": (BOUNDS, CASE, {}, CUT, {"blocks": 5, "cut": (3, 2)}),
    "cut into blocks": (BOUNDS, CASE, {"nheads": 2, "ngroups": 1}, CUT, {"blocks": 12, "cut": (1, 1)}),
    "one document": ((0, 300), CASE, {}, CUT, {"blocks": 5, "cut": (2, 2)}),
    "whole blocks": ((0, 64, 192, 256), CASE, {}, WHOLE, {"blocks": 2}),
    "one token each": (range(20), CASE, {}, WHOLE, {"blocks": 2}),
    "one token each, cut": (range(20), CASE, {}, CUT, {"blocks": 5, "cut": (6, 5)}),
    "empty at both ends": ((0, 0, 0, 70, 70, 70), CASE, {}, WHOLE, {"blocks": 2}),
    "all empty but one": ((0, 0, 0, 0, 100, 100), CASE, {}, CUT, {"blocks": 5, "cut": (2, 1)}),
    "many": (range(0, 140, 4), CASE, {"nheads": 4, "ngroups": 1}, WHOLE, {"blocks": 2}),
    "no states given": (BOUNDS, replace(CASE, initial_states=False), {}, CUT, {"blocks": 5, "cut": (3, 2)}),
    "strong decay": (BOUNDS, replace(CASE, strong_decay=True), {}, CUT, {"blocks": 5, "cut": (3, 2)}),
    "gate": (BOUNDS, GATE, {}, CUT, {"blocks": 5, "cut": (3, 2)}),
    "packed": (BOUNDS, Case(D="h", packed=True, dt_limit=(0.02, 0.08), initial_states=True, documents="states"), {}, WHOLE,
               {"blocks": 2}),
    "D of channels, short chunks": (BOUNDS, replace(CASE, D="hp"), {"chunk_size": 16}, CUT,
                                    {"blocks": 5, "cut": (3, 2)}),
    "odd heads in splits": (BOUNDS, CASE, {"nheads": 3, "ngroups": 1}, WHOLE, {"blocks": 2, "splits": 2}),
    "headdim 80": (BOUNDS, CASE, {"headdim": 80, "nheads": 2}, CUT, {"blocks": 5, "cut": (3, 2)}),
    "headdim 128": (BOUNDS, CASE, {"headdim": 128, "nheads": 2, "dstate": 128}, WHOLE, {"blocks": 2}),
    "headdim 24, dstate 48": (BOUNDS, CASE, {"headdim": 24, "dstate": 48}, WHOLE, {"blocks": 2}),
    "dstate 160, gate": (BOUNDS, GATE, {"dstate": 160, "nheads": 2, "ngroups": 1}, TWO_PARTS, {"blocks": 2}),
    "dstate 256, cut": ((0, 90, 200), CASE, {"dstate": 256, "nheads": 2, "ngroups": 1},
                        (PIECES, SCAN, SCAN, PIECES, STATES, GROUP, GROUP), {"blocks": 8, "cut": (3, 2)}),
}
SEVERAL_SCHEDULES = "cut into blocks", "odd heads in splits"


@pytest.fixture(scope="module")
def executor() -> Executor:
    return Executor(*KERNELS)


@pytest.mark.skipif(GPU, reason="the kernels themselves run on a GPU")
@pytest.mark.parametrize("way", WAYS)
def test_right(way, executor):
    bounds, case, sizes, runs, dealing = WAYS[way]
    plain = case.packed or case.z or case.D == "hp"  # some kernels are: the interpreter rounds to bf16 in its own way
    dtype = torch.float16 if plain else torch.bfloat16
    inputs = draw(bounds, replace(case, initial_states=True), dtype, shape=replace(SHAPE, **sizes))
    if not case.initial_states:
        inputs = replace(inputs, initial_states=None)
    ways, first = cotangents(inputs), None
    for executor.seed in range(3 if way in SEVERAL_SCHEDULES else 1):
        executor.launched.clear()
        with hopper_on_cpu(executor, **dealing):
            got = results("persistent", inputs, *ways)
        assert tuple(executor.launched) == runs
        first = first or got
        assert all(torch.equal(t, first[name]) for name, t in got.items())
    assert_all_accurate(first, truths(inputs, *ways), inputs, *ways)


@pytest.mark.skipif(GPU, reason="the kernels themselves run on a GPU")
@pytest.mark.parametrize(("variant", "options", "keeps"), (
    ("persistent", Options(), True), ("persistent", PLAIN_BACKWARD, False), ("fused", Options(), False),
    ("baseline", Options(), False)))
@pytest.mark.parametrize("chunk_size", (16, 64))
def test_states_kept_are_those_declared(variant, options, keeps, chunk_size, executor):
    """By a forward whose backward reads them, and no other, as many as torch.compile is told."""
    inputs = draw(BOUNDS, CASE, torch.float16, shape=replace(SHAPE, nheads=2, ngroups=1, chunk_size=chunk_size))
    given = *inputs.tensors, *inputs.settings, variant, autograd.encode(options), True
    with hopper_on_cpu(executor, 2):
        got, declared = autograd.forward(*given), autograd.forward_fake(*given)
    assert [(0,) if t is None else t.shape for t in got] == [t.shape for t in declared]
    assert (got[-1] is not None) == keeps


@pytest.mark.skipif(GPU, reason="the kernels themselves run on a GPU")
def test_plain_backward_of_short_chunks(executor):
    """It could not read the states that a forward for Hopper would keep."""
    inputs = draw(BOUNDS, CASE, torch.float16, shape=replace(SHAPE, chunk_size=16))
    ways = cotangents(inputs)
    executor.launched.clear()
    with hopper_on_cpu(executor, 2):
        got = results("persistent", inputs, *ways, PLAIN_BACKWARD)
    assert tuple(executor.launched) == (SCAN,)
    assert_all_accurate(got, truths(inputs, *ways), inputs, *ways)


@pytest.mark.skipif(GPU, reason="the kernels themselves run on a GPU")
@pytest.mark.parametrize("gradient", ("dout", "dfinal_states"))
def test_one_gradient_alone(gradient, executor):
    inputs = draw(BOUNDS, CASE, torch.bfloat16, shape=replace(SHAPE, nheads=2, ngroups=1))
    ways = one_cotangent(inputs, gradient)
    with hopper_on_cpu(executor, 2):
        got = results("persistent", inputs, *ways)
    assert_all_accurate(got, truths(inputs, *ways), inputs, *ways)


@pytest.mark.skipif(GPU, reason="the kernels themselves run on a GPU")
@pytest.mark.parametrize(("way", "given"), [
    *product(("several rounds", "odd heads in splits", "headdim 24, dstate 48"),
             ("both", "initial_states", "dfinal_states")), ("many", "both")])
def test_recomputed(way, given, executor):
    """Walks of both directions in one launch, each with states to begin with or with none."""
    bounds, case, sizes, _, dealing = WAYS[way]
    inputs = draw(bounds, case, torch.bfloat16, shape=replace(SHAPE, **sizes))
    dout, dfinal_states = cotangents(inputs)
    if given == "initial_states":
        dfinal_states = None
    if given == "dfinal_states":
        inputs = replace(inputs, initial_states=None)
    with hopper_on_cpu(executor, **dealing):
        got = results("persistent", inputs, dout, dfinal_states, Options(save_states=False))
    assert_all_accurate(got, truths(inputs, dout, dfinal_states), inputs, dout, dfinal_states)


def misalign(t: torch.Tensor) -> torch.Tensor:
    """The same, where the TMA cannot take it."""
    return torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape).copy_(t)


@over_forms_of_states
@pytest.mark.skipif(GPU, reason="the kernels themselves run on a GPU")
@pytest.mark.parametrize("which", (0, 1))
def test_states_of_any_form(which, like, executor):
    """initial_states or dfinal_states, beside others in fp32."""
    check_states_of_form(which, like, executor)


@pytest.mark.skipif(GPU, reason="the kernels themselves run on a GPU")
@pytest.mark.parametrize(("which", "like"), ((0, misalign), (1, misalign), (1, torch.Tensor.double)))
def test_states_that_are_copied(which, like, executor):
    check_states_of_form(which, like, executor)


def check_states_of_form(which, like, executor):
    inputs = draw((0, 30, 30, 95, 96), CASE, torch.bfloat16, shape=replace(SHAPE, nheads=2, ngroups=1))
    dout, dfinal_states = cotangents(inputs)
    if which:
        dfinal_states = like(dfinal_states)
    else:
        inputs = replace(inputs, initial_states=like(inputs.initial_states))
    for options in (Options(), Options(save_states=False)):
        with hopper_on_cpu(executor, 5, cut=(3, 2)):  # what is copied is copied before the state pass
            got = results("persistent", inputs, dout, dfinal_states, options)
        assert_all_accurate(got, truths(inputs, dout, dfinal_states), inputs, dout, dfinal_states)


@pytest.mark.skipif(GPU, reason="the kernels themselves run on a GPU")
@pytest.mark.parametrize("like", (torch.empty_like, lambda t: misalign(torch.empty_like(t))), ids=("aligned", "misaligned"))
def test_gradient_where_it_is_asked_to_be(like, executor):
    inputs = draw((0, 30, 30, 96), CASE, torch.bfloat16, shape=replace(SHAPE, nheads=2, ngroups=1))
    variant, ways = get_variant("persistent"), cotangents(inputs)
    with hopper_on_cpu(executor, 2):
        expected = results(variant, inputs, *ways)["dinitial_states"]
        place = like(expected)
        grads = variant.backward(variant.forward(inputs, Options(), True)[2], *ways, SSDGrads(dinitial_states=place))
    assert grads.dinitial_states is place and torch.equal(place, expected)


@contextmanager
def noted_copies() -> Iterator[list]:
    """By the TMA: the memory that each is of or to, and where in it the box begins."""
    noted, check = [], Descriptor.check

    def note(descriptor, at, buffer):
        noted.append((descriptor.memory.data_ptr(), tuple(at)))
        check(descriptor, at, buffer)

    with patch.object(Descriptor, "check", note):
        yield noted


@contextmanager
def noted_prefetches() -> Iterator[list]:
    """Where each began, and its bytes."""
    noted = []

    def note(pointer, nbytes):
        noted.append((pointer, nbytes))
        return prefetch(pointer, nbytes)

    with patch.dict(language.ASSEMBLY, {PREFETCH: note}):
        yield noted


@pytest.mark.skipif(GPU, reason="the kernels themselves run on a GPU")
@pytest.mark.parametrize("way", ("several rounds", "cut", "empty at both ends", "odd heads in splits", "headdim 80"))
def test_each_state_is_brought(way, executor):
    """Of each document and head: initial_states into L2 for the scan, dfinal_states by the TMA."""
    bounds, case, sizes, _, dealing = WAYS[way]
    inputs = draw(bounds, case, torch.bfloat16, shape=replace(SHAPE, **sizes))
    dout, dfinal_states = cotangents(inputs)
    with noted_prefetches() as prefetched, noted_copies() as copied, hopper_on_cpu(executor, **dealing):
        results("persistent", inputs, dout, dfinal_states)
    assert {pointer.t.data_ptr() for pointer, _ in prefetched} == {inputs.initial_states.data_ptr()}
    assert sum({pointer.offsets: nbytes for pointer, nbytes in prefetched}.values()) == inputs.initial_states.nbytes
    boxes = {at for memory, at in copied if memory == dfinal_states.data_ptr()}
    states, slices = range(len(dfinal_states) * inputs.nheads), range(0, inputs.headdim, 64)
    assert boxes == {(state, row, 0) for state in states for row in slices}


@pytest.mark.skipif(GPU, reason="the kernels themselves run on a GPU")
def test_the_state_pass_walks_a_document_alone(executor):
    """Of the four before the cut the last one, whose state it is that crosses: it loads one state of each head, not four."""
    inputs = draw(range(0, 513, 64), CASE, torch.bfloat16, shape=replace(SHAPE, nheads=2, ngroups=1))
    with noted_copies() as noted, hopper_on_cpu(executor, 5, cut=(8, 8)):
        get_variant("persistent").forward(inputs, Options(), False)
    assert [memory for memory, _ in noted].count(inputs.initial_states.data_ptr()) == 2


@pytest.mark.skipif(GPU, reason="the kernels themselves run on a GPU")
def test_documents_do_not_meet(executor):
    """A document's results are the same bits whatever the others hold, and however they are cut apart."""
    inputs = draw(BOUNDS, CASE, torch.bfloat16, shape=replace(SHAPE, nheads=2, ngroups=1))
    dout, dfinal_states = cotangents(inputs)
    start, end = BOUNDS[-3:-1]
    other = {name: torch.randn_like(t) for name in ("x", "B", "C") if (t := getattr(inputs, name)) is not None}
    for name, t in other.items():
        t[:, start:end] = getattr(inputs, name)[:, start:end]
    dother = torch.randn_like(dout)
    dother[:, start:end] = dout[:, start:end]
    with hopper_on_cpu(executor, 2):
        alone = results("persistent", inputs, dout, dfinal_states)
        beside = results("persistent", replace(inputs, **other), dother, dfinal_states)
    for name in ("out", "dx", "ddt", "dB", "dC"):
        assert torch.equal(alone[name][:, start:end], beside[name][:, start:end]), name
    for name in ("final_states", "dinitial_states"):
        assert torch.equal(alone[name][4], beside[name][4]), name


@pytest.mark.skipif(GPU, reason="the kernels themselves run on a GPU")
def test_fused_takes_them_in_the_backward(executor):
    """Its forward cuts them into rows."""
    inputs = draw((0, 70, 100), CASE, torch.float16, shape=replace(SHAPE, nheads=2, ngroups=1))
    ways = cotangents(inputs)
    executor.launched.clear()
    with hopper_on_cpu(executor, 2):
        got = results("fused", inputs, *ways)
    assert tuple(executor.launched) == (STATES, SCAN, STATES, GROUP)
    assert_all_accurate(got, truths(inputs, *ways), inputs, *ways)


def list_blocks(bounds, seqlen):
    """As document_blocks writes them, the long way."""
    rows = []
    for d, (start, end) in enumerate(pairwise(bounds)):
        n, first = max(1, -(-(end - start) // 64)), len(rows)
        for k in range(n):
            token = end - (n - k) * 64 if end > start else seqlen
            count = min(64, token + 64 - start) if end > start else 0
            rows.append([token, count, d if k == 0 else -1, d if k == n - 1 else -1, first, first + n - 1])
    return rows


@pytest.mark.parametrize("bounds", [
    BOUNDS, (0, 0, 0, 64, 64), (0, 1), (0, 300), tuple(range(200)), (0, *[130] * 70, 4000), (3, 10, -4, 99, 5, 70)], ids=str)
def test_blocks(bounds, device):
    """Of any bounds, those from outside of the row and those that fall too."""
    seqlen = 70 if bounds[0] else bounds[-1]
    case, shape = Case(initial_states=True, documents="states"), Shape(1, 1, 1, 8, 1, 8, 16)
    inputs = draw((0, seqlen), case, torch.float32, device, shape)
    inputs = replace(inputs, cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device=device))
    blocks = document_blocks(inputs)
    rising = find_bounds(inputs.cu_seqlens, seqlen).tolist()
    expected = list_blocks(rising, seqlen)
    total = len(expected)
    assert blocks[:total].tolist() == expected
    assert blocks[total:-1, :4].tolist() == [[seqlen, 0, -1, -1]] * (len(blocks) - 1 - total)
    assert blocks[-1, :4].tolist() == [total, 0, -1, -1]
