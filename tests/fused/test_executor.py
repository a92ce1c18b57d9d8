"""The Hopper path without a GPU, by the same bounds as on one (test_hopper): its kernels run in `tests.executor`.

Some cases run under several schedules, whose results must be the same bits.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from fused import hopper_backward
from fused import split_backward as halves
from ssd.reference import compute_in_fp64
from ssd.registry import Variant, get_variant
from ssd.types import Options, SSDGrads, SSDInputs
from tests.errors import assert_all_accurate, cotangents, error, one_cotangent, results, truths, truths_apart
from tests.executor import Executor
from tests.fused.hopper_on_cpu import KERNELS, hopper_on_cpu
from tests.fused.test_hopper import assert_dA_precise, over_forms_of_states, short_documents
from tests.inputs import Case, Shape, random_inputs, split

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves run here")
RAGGED = Shape(2, 150, 4, 64, 2, 64, 128)
LONG = Shape(1, 9 * 64 + 22, 4, 64, 1, 64, 64)
WIDE = Shape(1, 5 * 64 - 1, 2, 64, 1, 128, 128)
USUAL = Options()
PLAIN = Case(dt_dtype=torch.float32)  # the interpreter, which runs the other kernels, rounds to bf16 in its own way
START = Case(D="h", dt_bias=True, dt_softplus=True, initial_states=True, dt_dtype=torch.float32)
NO_START = replace(START, initial_states=False)
SCAN, STATES, GROUP = "hopper_scan_kernel", "hopper_states_kernel", "hopper_group_kernel"
PIECES = "hopper_pieces_kernel"


@dataclass(frozen=True)
class Way:
    """What runs: the inputs, the variant and its options, and how `hopper_on_cpu` deals the work.

    runs: the kernels for Hopper that a forward and a backward launch, in order. schedules: as many of the executor's.
    """

    shape: Shape
    case: Case
    runs: tuple[str, ...]
    dtype: torch.dtype = torch.bfloat16
    variant: str = "persistent"
    options: Options = USUAL
    blocks: int = 2
    cut: tuple | None = None
    splits: int | None = None
    schedules: int = 1


AGAIN = Options(save_states=False)
SAVED, CUT = (SCAN, STATES, GROUP), (PIECES, SCAN, PIECES, STATES, GROUP)
TWO_LEVEL = STATES, SCAN, STATES, GROUP
WAYS = {
    "ragged": Way(RAGGED, PLAIN, SAVED),
    "ragged, recomputed": Way(RAGGED, START, SAVED, torch.float16, options=AGAIN, schedules=3),
    "one token": Way(replace(RAGGED, batch=8, seqlen=1), START, SAVED, blocks=3),
    "several rounds": Way(replace(RAGGED, batch=3), START, SAVED, options=AGAIN),
    "cut": Way(LONG, NO_START, CUT, blocks=5, cut=(3, 2)),
    "cut, states given": Way(LONG, START, CUT, blocks=5, cut=(3, 2)),
    "cut for spans, none given": Way(LONG, NO_START, (PIECES, *TWO_LEVEL[:2], *CUT[2:]), variant="fused", options=AGAIN,
                                     blocks=5, cut=(3, 2)),
    "end to end": Way(replace(LONG, nheads=6), START, CUT, blocks=4, cut=(8, None), options=AGAIN),
    "cut, recomputed": Way(LONG, START, CUT, torch.float16, options=AGAIN, blocks=8, cut=(4, 4), schedules=2),
    "whole and cut": Way(replace(RAGGED, batch=3, nheads=2, ngroups=1), START, CUT, cut=(2, 1)),
    "wide": Way(WIDE, START, SAVED),
    "wide, recomputed": Way(WIDE, PLAIN, CUT, torch.float16, options=AGAIN, blocks=4, cut=(2, 2)),
    "documents": Way(RAGGED, replace(START, documents="seq_idx"), SAVED),
    "strong decay": Way(RAGGED, replace(START, strong_decay=True), SAVED),
    "packed": Way(RAGGED, Case(D="h", packed=True, dt_limit=(0.02, 0.08)), SAVED, torch.float16),
    "packed, gate": Way(RAGGED, Case(D="h", dt_bias=True, dt_softplus=True, initial_states=True, z=True, packed=True,
                                     dt_limit=(0.02, 0.08)), SAVED, torch.float16),
    "spans": Way(LONG, START, TWO_LEVEL, variant="fused", schedules=2),
    "spans, recomputed": Way(LONG, START, TWO_LEVEL, torch.float16, variant="fused", options=AGAIN),
    "spans in turn": Way(LONG, PLAIN, TWO_LEVEL, options=Options(stationary=False)),
    "states in fp32": Way(RAGGED, replace(START, state_dtype=torch.float32), TWO_LEVEL, variant="fused"),
    "cut for spans": Way(LONG, START, (PIECES, *TWO_LEVEL[:2], *CUT[2:]), variant="fused", options=AGAIN, blocks=5, cut=(3, 2)),
    "heads in parts": Way(replace(RAGGED, batch=1, nheads=6, ngroups=1), START, SAVED, torch.float16, splits=2),
    "a head in each part": Way(replace(RAGGED, batch=1, ngroups=1), START, SAVED, torch.float16, splits=4),
}


def other_form(case: Case = START, runs: tuple[str, ...] = SAVED, dtype: torch.dtype = torch.bfloat16, *,
               shape: Shape = replace(RAGGED, batch=1), blocks: int = 1, **of) -> Way:  # noqa: B008  frozen
    """`shape` with the sizes given. One block takes all of a row's heads in turn."""
    sizes = {name: of.pop(name) for name in vars(shape) if name in of}
    return Way(replace(shape, **sizes), case, runs, dtype, blocks=blocks, **of)


GATE = replace(START, z=True)
WAYS |= {
    "odd heads": other_form(nheads=6, schedules=2),
    "odd heads, cut": other_form(START, CUT, shape=LONG, nheads=3, blocks=5, cut=(3, 2)),
    "odd heads, spans": other_form(START, TWO_LEVEL, torch.float16, variant="fused", nheads=3, ngroups=1),
    "a head a group": other_form(nheads=3, ngroups=3, options=AGAIN),
    "a head a group, packed": other_form(Case(D="h", packed=True, dt_limit=(0.02, 0.08)), SAVED, torch.float16, nheads=2),
    "headdim 80": other_form(headdim=80),
    "headdim 80, recomputed, cut": other_form(START, CUT, torch.float16, shape=LONG, headdim=80, nheads=2, options=AGAIN,
                                              blocks=8, cut=(4, 4)),
    "headdim 80, spans": other_form(START, TWO_LEVEL, variant="fused", headdim=80, nheads=2),
    "headdim 128": other_form(headdim=128, nheads=2),
    "headdim 128, heads in splits": other_form(headdim=128, nheads=3, ngroups=1, splits=2),
    "headdim 112, dstate 64": other_form(headdim=112, dstate=64, nheads=2, ngroups=1, options=AGAIN),
    "headdim 32": other_form(headdim=32, dstate=64),
    "headdim 48, dstate 80": other_form(headdim=48, dstate=80, options=AGAIN),
    "headdim 16, dstate 64": other_form(headdim=16, dstate=64, nheads=3, ngroups=1),
    "headdim 24, dstate 48, states in fp32": other_form(replace(START, state_dtype=torch.float32), TWO_LEVEL, variant="fused",
                                                        headdim=24, dstate=48, nheads=2),
    "headdim 96, documents": other_form(replace(START, documents="seq_idx"), headdim=96, nheads=2),
    "short chunks, spans": other_form(START, TWO_LEVEL, variant="fused", options=AGAIN, chunk_size=16),
    "D by channel": other_form(replace(START, D="hp"), dtype=torch.float16, headdim=80, nheads=2),
    "D by channel, gate, documents": other_form(replace(GATE, D="hp", documents="seq_idx"), dtype=torch.float16),
    "gate": other_form(GATE, SAVED, torch.float16, schedules=2),
    "gate in fp32": other_form(replace(GATE, z_dtype=torch.float32), dtype=torch.float16),
    "gate, headdim 80, recomputed": other_form(GATE, SAVED, torch.float16, headdim=80, nheads=2, options=AGAIN),
    "gate, states in fp32": other_form(replace(GATE, state_dtype=torch.float32), (SCAN,), torch.float16, headdim=96, dstate=80,
                                       nheads=2, options=Options(fuse_backward=False)),
    "gate, spans": other_form(GATE, TWO_LEVEL, torch.float16, variant="fused", nheads=2),
}
# Above a dstate of 128 one launch scans both parts, and the backward goes by spans.
WIDE_SCAN, SPANS = "hopper_wide_scan_kernel", ("hopper_ends_kernel", "hopper_pairs_kernel")
PARTS, PARTS_CUT = (WIDE_SCAN, STATES, *SPANS), (PIECES, WIDE_SCAN, PIECES, STATES, *SPANS)
WAYS |= {
    "dstate 256": other_form(START, PARTS, dstate=256, nheads=2, ngroups=1, schedules=3),
    "dstate 256, headdim 128, recomputed, cut": other_form(START, PARTS_CUT, torch.float16, shape=LONG, headdim=128, dstate=256,
                                                           nheads=1, options=AGAIN, blocks=8, cut=(4, 3)),
    "dstate 256, headdim 128, D by channel": other_form(replace(START, D="hp"), PARTS_CUT, torch.float16, shape=LONG,
                                                        headdim=128, dstate=256, nheads=1, blocks=8, cut=(4, 4)),
    "dstate 192, spans": other_form(START, (STATES, *PARTS), variant="fused", dstate=192, nheads=4, ngroups=2),
    "dstate 160, headdim 80, gate": other_form(GATE, PARTS, torch.float16, dstate=160, headdim=80, nheads=2, ngroups=1),
    "dstate 256, gate in fp32": other_form(replace(GATE, z_dtype=torch.float32), PARTS, torch.float16, dstate=256, nheads=2,
                                           ngroups=1),
    "dstate 256, gate, states in fp32": other_form(replace(GATE, state_dtype=torch.float32), (WIDE_SCAN,), torch.float16,
                                                   headdim=96, dstate=256, nheads=2, ngroups=1,
                                                   options=Options(fuse_backward=False)),
    "dstate 136, odd heads in splits": other_form(START, PARTS, headdim=32, dstate=136, nheads=3, ngroups=1, splits=2),
    "dstate 256, documents": other_form(replace(START, documents="seq_idx"), PARTS, batch=3, dstate=256, nheads=4, ngroups=2,
                                        blocks=2),
}


@pytest.fixture(scope="module")
def executor() -> Executor:
    return Executor(*KERNELS)


def draw(way: Way) -> tuple[SSDInputs, Variant]:
    return random_inputs(way.shape, way.case, way.dtype), get_variant(way.variant)


def under_schedules(executor: Executor, way: Way, run: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Results by name of run(), the same under every seed; it launches what the way says."""
    first = None
    for executor.seed in range(way.schedules):
        executor.launched.clear()
        with hopper_on_cpu(executor, way.blocks, way.cut, way.splits):
            got = run()
        assert tuple(executor.launched) == way.runs
        first = first or got
        assert all(torch.equal(t, first[name]) for name, t in got.items())
    return first


def check(executor: Executor, way: Way, inputs: SSDInputs | None = None, ways: tuple[torch.Tensor | None, ...] = ()) -> None:
    """All results are right. ways: dout and dfinal_states, if not `cotangents`."""
    drawn, variant = draw(way)
    inputs = inputs or drawn
    ways = ways or cotangents(inputs)
    got = under_schedules(executor, way, lambda: results(variant, inputs, *ways, way.options))
    assert_all_accurate(got, truths(inputs, *ways), inputs, *ways)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("name", WAYS)
def test_right(name, executor):
    check(executor, WAYS[name])


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("name", ("gate", "gate in fp32", "gate, headdim 80, recomputed", "dstate 160, headdim 80, gate"))
def test_y_from_the_output(name, executor, monkeypatch):
    """As in bf16, which the interpreter rounds wrongly."""
    monkeypatch.setattr(SSDInputs, "keeps_y", lambda self, save: False)
    check(executor, WAYS[name])


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("gradient", ("dout", "dfinal_states"))
def test_one_gradient_alone(gradient, executor):
    way = replace(WAYS["ragged"], case=START)
    inputs, _ = draw(way)
    check(executor, way, inputs, one_cotangent(inputs, gradient))


@over_forms_of_states
def test_states_of_any_form(like, executor):
    """The kernels read them as they were given, contiguous ones."""
    way = replace(WAYS["cut, states given"], options=AGAIN)  # what is copied is copied before the state pass
    inputs, _ = draw(way)
    inputs = replace(inputs, initial_states=like(inputs.initial_states))
    dout, dfinal_states = cotangents(inputs)
    check(executor, way, inputs, (dout, like(dfinal_states)))


def test_steps_of_zero(executor):
    """Their logarithm, in which masks are made, is -inf."""
    way = replace(WAYS["ragged"], case=replace(PLAIN, D="h"))
    inputs, _ = draw(way)
    inputs.dt[:, ::3] = -1
    check(executor, way, inputs)


@pytest.mark.parametrize("dstate", (128, 256))
def test_products_beyond_fp16_that_decay_takes_back(dstate, executor):
    """C B^T is then rounded after the decay alone."""
    way = Way(Shape(1, 100, 2, 64, 1, dstate, 128), replace(PLAIN, D="h"), (), torch.float16)
    inputs, variant = draw(way)
    large = (1.1 * 2**16 / dstate) ** 0.5
    inputs = replace(inputs, B=torch.full_like(inputs.B, large), C=torch.full_like(inputs.C, large),
                     A=torch.full_like(inputs.A, -16.0), dt=torch.full_like(inputs.dt, 0.1))
    dout = torch.randn_like(inputs.x) * 0.01
    with hopper_on_cpu(executor):
        got = results(variant, inputs, dout, None)
    assert all(t.isfinite().all() for t in got.values())
    assert error(got["ddt"], truths(inputs, dout, None)["ddt"]).rms < 1e-2


def test_last_state(executor):
    """As a split backward asks for it: few states are written on the way there."""
    inputs = random_inputs(replace(LONG, seqlen=LONG.seqlen + 64), START, torch.bfloat16)
    inputs = replace(inputs, initial_states=inputs.initial_states.mT.contiguous().mT)  # copied before the state pass
    way = Way(LONG, START, (PIECES, STATES), blocks=5, cut=(3, 2))
    got = under_schedules(executor, way, lambda: {"last": hopper_backward.compute_last_state(inputs, Options())})
    assert error(got["last"], truths(inputs, *cotangents(inputs))["final_states"]).rms < 1e-2


def test_states_in_fp32_for_other_backwards(executor):
    """The scan writes them, one for each sub-chunk: those in which what came before it ends."""
    way = replace(WAYS["ragged"], case=replace(PLAIN, state_dtype=torch.float32), runs=(SCAN,))
    inputs, variant = draw(way)
    options = Options(fuse_backward=False)
    got = under_schedules(executor, way, lambda: {"states": variant.forward(inputs, options, True)[2].prev_states})
    states = got["states"]
    assert states.shape[1] == 3 and states.dtype == torch.float32 and not states[:, 0].any()
    for n in (1, 2):
        assert error(states[:, n], compute_in_fp64(split(inputs, 0, 64 * n))[1]).rms < 1e-2


@pytest.mark.parametrize(("dtype", "bound"), ((torch.float16, 1e-3), (torch.bfloat16, 4e-3)))
def test_a_quiet_end_keeps_what_came_before(dtype, bound, executor):
    """Nine sub-chunks of zeros, over which what came before decays to a hundred-thousandth: less than fp16 has places for."""
    inputs = random_inputs(Shape(1, 16 * 64, 2, 64, 1, 64, 64), PLAIN, dtype)
    inputs = replace(inputs, A=torch.full_like(inputs.A, -2.0), dt=torch.full_like(inputs.dt, 0.01))
    inputs.x[:, -9 * 64 :] = 0
    with hopper_on_cpu(executor, blocks=5, cut=(15, 15)):
        _, state, _ = get_variant("persistent").forward(inputs, USUAL, False)
    assert PIECES in executor.launched and error(state, compute_in_fp64(inputs)[1]).rms < bound


def test_same_bits_saved_or_not(executor):
    """Where both are cut alike."""
    way = replace(WAYS["whole and cut"], runs=(PIECES, SCAN))
    inputs, variant = draw(way)

    def run(save: bool) -> dict[str, torch.Tensor]:
        return dict(zip(("out", "final_states"), variant.forward(inputs, Options(), save)[:2], strict=True))

    saved, unsaved = (under_schedules(executor, way, partial(run, save)) for save in (True, False))
    assert all(torch.equal(saved[name], unsaved[name]) for name in saved)


over_backwards = pytest.mark.parametrize(("dstate", "runs"), ((64, (STATES, GROUP)), (192, PARTS[1:])))


def prepare_backward(dstate, runs, executor):
    """A way, its variant, what a forward saved, cotangents, and the results of both without places."""
    way = WAYS["ragged, recomputed"]
    way = replace(way, shape=replace(way.shape, dstate=dstate), runs=runs)
    inputs, variant = draw(way)
    ways = cotangents(inputs)
    with hopper_on_cpu(executor, way.blocks):
        return way, variant, variant.forward(inputs, AGAIN, True)[2], ways, results(variant, inputs, *ways, AGAIN)


@pytest.mark.parametrize("step", (1, 2))
@over_backwards
def test_gradients_where_they_are_asked_to_be(dstate, runs, step, executor):
    """In contiguous places, which the kernels write, and in others."""
    way, variant, saved, ways, expected = prepare_backward(dstate, runs, executor)
    names = "dx", "dB", "dC", "dinitial_states"

    def run() -> dict[str, torch.Tensor]:
        places = {name: torch.zeros(*expected[name].shape[:-1], step * expected[name].shape[-1], dtype=expected[name].dtype)
                  for name in names}
        into = {name: t[..., ::step] for name, t in places.items()}
        grads = variant.backward(saved, *ways, SSDGrads(**into))
        assert all(getattr(grads, name) is t for name, t in into.items())
        assert all(not t[..., 1::2].any() for t in places.values()) or step == 1
        return into

    got = under_schedules(executor, way, run)
    assert all(torch.equal(t, expected[name]) for name, t in got.items())


@over_backwards
def test_gradients_in_rows_of_one_tensor(dstate, runs, executor):
    """As in the gradient of a packed projection, of which nothing else is written."""
    way, variant, saved, ways, expected = prepare_backward(dstate, runs, executor)
    names = "dx", "dB", "dC"
    sizes = [expected[name].shape[2:].numel() for name in names]
    *parts, rest = torch.zeros(*expected["dx"].shape[:2], sum(sizes) + 8, dtype=expected["dx"].dtype).split([*sizes, 8], 2)
    into = {name: t.unflatten(2, expected[name].shape[2:]) for name, t in zip(names, parts, strict=True)}
    with hopper_on_cpu(executor, way.blocks):
        grads = variant.backward(saved, *ways, SSDGrads(**into))
    assert all(getattr(grads, name) is t and torch.equal(t, expected[name]) for name, t in into.items()) and not rest.any()


def test_documents_of_a_row_are_as_if_run_apart(executor):
    """And no gradient crosses from one to another, to the bit."""
    case = replace(START, documents="seq_idx", initial_states=False)
    way = replace(WAYS["documents"], shape=replace(RAGGED, batch=1), case=case)
    inputs, variant = draw(way)
    dout, dfinal_states = cotangents(inputs)
    begins = (inputs.seq_idx[0].diff() != 0).nonzero().flatten() + 1
    ends = [0, *begins.tolist(), inputs.seqlen]
    assert len(ends) > 3
    got = under_schedules(executor, way, lambda: results(variant, inputs, dout, dfinal_states))
    assert_all_accurate(got, truths_apart(inputs, ends, dout, dfinal_states), inputs, dout, dfinal_states)
    last = dout.clone()
    last[:, : ends[-2]] = 0
    got = under_schedules(executor, way, lambda: results(variant, inputs, last, dfinal_states))
    for name in ("dx", "dB", "dC"):
        assert not got[name][:, : ends[-2]].any() and got[name][:, ends[-2] :].any()


@pytest.mark.parametrize(("dstate", "runs"), ((64, SAVED), (192, PARTS)))
def test_dA_of_short_documents(dstate, runs, executor):
    inputs = short_documents("cpu", dstate)
    ways, way = cotangents(inputs), replace(WAYS["documents"], runs=runs)
    got = under_schedules(executor, way, lambda: results(get_variant("persistent"), inputs, *ways))
    assert_dA_precise(got, inputs, ways)


@pytest.mark.parametrize("batch", (1, 2))
def test_backward_in_halves(batch, executor, monkeypatch):
    """Of the batch, or of a sequence, from the state in its middle."""
    monkeypatch.setattr(halves, "_MOST_BYTES", 0)
    parts = (STATES,) * (2 - batch) + (STATES, GROUP) * 2
    check(executor, replace(WAYS["ragged, recomputed"], shape=replace(RAGGED, batch=batch, seqlen=190), runs=(SCAN, *parts)))


@pytest.mark.parametrize(("nsub", "heads", "headdim", "blocks", "cut"), [
    (9, 1, 128, 20, (1, 1)), (9, 2, 64, 20, (3, 2)), (7, 4, 64, 3, (3, 2)), (7, 3, 128, 4, (2, 1))])
def test_pieces_in_tiles(nsub, heads, headdim, blocks, cut, executor):
    """In bf16 they come to the wide scan as tiles do: more of them than there are slots, or to a block's second run too."""
    way = Way(Shape(1, nsub * 64 - 1, heads, headdim, 1, 256, 64), START, (PIECES, WIDE_SCAN), torch.bfloat16, blocks=blocks,
              cut=cut)
    inputs, variant = draw(way)

    def run():
        return dict(zip(("out", "final_states"), variant.forward(inputs, AGAIN, False), strict=False))

    right = truths(inputs, *cotangents(inputs))
    for name, got in under_schedules(executor, way, run).items():
        assert error(got, right[name]).rms < 5e-3, name
