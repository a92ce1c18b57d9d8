"""What "auto" chooses, as if on GPUs that are not here: by measured calls, and by a cost model between and beyond them."""

import sys
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch

from fused import hopper
from ssd import auto_variant, registry, ssd_chunk_scan, variant_times
from ssd.registry import Variant, get_variant, list_candidates
from ssd.runtime import tuning
from ssd.types import Options, SSDGrads, SSDInputs, SSDSaved
from ssd.variant_times import Call, TimeTable, count_work
from ssd.variants import VARIANTS
from tests.errors import cotangents
from tests.experiments.small import without_gpu
from tests.inputs import EVERYTHING, OURS, Case, Shape, arguments, leaves, random_inputs

CANDIDATES = ("persistent", "fused", "baseline")
HOPPER = {"persistent": "persistent on Hopper", "fused": "fused on Hopper", "baseline": "baseline"}
PLAIN = {name: name for name in CANDIDATES}
OTHERS = PLAIN | {"persistent": "persistent off Hopper"}
CALL = Call("fwd", False, 2, batch=4, seqlen=4096, nheads=128, headdim=64, dstate=128, ngroups=8, chunk_size=128)
ODD = replace(CALL, nheads=25, ngroups=1)
TIMES = {CALL: {"persistent on Hopper": 240.0, "fused on Hopper": 440.0, "baseline": 1000.0},
         ODD: {"persistent": 800.0, "fused": 700.0, "baseline": 600.0}}
SHAPE = Shape(1, 40, 2, 16, 1, 16, 16)  # 3 chunks
STATES = 3 * 2 * 16 * 16 * 4  # bytes


def run(inputs, **options):
    return ssd_chunk_scan(**arguments(inputs) | options)


def model(**constants):
    """Constants of the cost model, 0 but for these."""
    return dict.fromkeys(count_work(CALL), 0.0) | constants


CONSTANTS = {("fwd", name): model(tokens=float(n + 1)) for n, name in enumerate(dict.fromkeys((*HOPPER.values(), *PLAIN)))}


@pytest.fixture
def rank(monkeypatch, tmp_path):
    """The order, and why, on a GPU; an H200 has a table of TIMES, an L4 one of few constants."""
    monkeypatch.setattr(variant_times, "TABLES", tmp_path)
    (tmp_path / "h200.json").write_text(TimeTable(CONSTANTS, TIMES).write())
    (tmp_path / "l4.json").write_text(TimeTable({("fwd", "fused"): model(launch=1.0)}, {}).write())
    for cached in (variant_times.get_table, variant_times.get_fallback):
        cached.cache_clear()
    yield auto_variant.rank_kernels
    for cached in (variant_times.get_table, variant_times.get_fallback):
        cached.cache_clear()


@pytest.mark.parametrize(("call", "kernels", "gpu", "expected", "said"), [
    (CALL, HOPPER, "h200", CANDIDATES, "expected to take 240 us, as measured on h200; fused 440 us, baseline 1000 us"),
    # a call that the Hopper kernels do not take learns nothing from their times
    (replace(ODD, seqlen=8192), PLAIN, "h200", ("baseline", "fused", "persistent"), str(ODD)),
    (replace(CALL, seqlen=8192), PLAIN, "h200", ("baseline",), ""),
    (CALL, OTHERS, "a100", ("baseline", "fused", "persistent"), "us, by the cost model of h200, since a100 has no table; "),
    # what a table lacks is had from another
    (CALL, PLAIN, "l4", ("fused",), "expected to take 1 us, by the cost model, since no such call was measured on l4; "),
    # what nothing is known of comes last
    (CALL, {"persistent": "new", "fused": "fused", "baseline": "newer"}, "h200", ("fused", "persistent", "baseline"), ""),
    (CALL, {"persistent": "new", "fused": "newest", "baseline": "newer"}, "h200", CANDIDATES, "nothing is known of 'new'"),
], ids=("measured", "other kernels", "another length", "no table", "few constants", "one known", "none known"))
def test_order_and_why(call, kernels, gpu, expected, said, rank):
    order, why = rank(call, kernels, gpu)
    assert order[: len(expected)] == expected and {*order} == {*CANDIDATES} and said in why


@pytest.mark.parametrize(("change", "distance"), [
    ({"seqlen": 8192}, 1), ({"batch": 1}, 2), ({"nheads": 64, "ngroups": 4}, 1), ({"ngroups": 4}, 0.25),
    ({"chunk_size": 64}, 0.5), ({"headdim": 128}, 2), ({"dstate": 32}, 4), ({"keeps": True}, 1), ({"gated": True}, 1)], ids=str)
def test_the_error_of_the_nearest_call_fades_with_distance(change, distance):
    call, constants = replace(CALL, **change), model(tokens=1.0)
    table = TimeTable({("fwd", "baseline"): constants}, {CALL: {"baseline": 4 * count_work(CALL)["tokens"]}})
    found = table.estimate(call, "baseline")
    assert found.near == CALL and found.distance == pytest.approx(distance)
    assert found.us == pytest.approx(count_work(call)["tokens"] * 4 ** 2 ** (-distance / 2))


@pytest.mark.parametrize("change", [{"mode": "bwd"}, {"itemsize": 4}], ids=str)
def test_other_modes_and_elements_are_not_compared(change):
    call = replace(CALL, **change)
    table = TimeTable({("fwd", "baseline"): model(launch=7.0), ("bwd", "baseline"): model(launch=7.0)},
                      {CALL: {"baseline": 50.0}})
    assert table.estimate(call, "baseline").us == 7.0


@pytest.mark.parametrize("mode", ["fwd", "bwd"])
@pytest.mark.parametrize("name", ["batch", "seqlen", "nheads", "headdim", "dstate", "ngroups"])
def test_more_work_takes_no_less(mode, name):
    call = replace(CALL, mode=mode, nheads=16, ngroups=4)
    less, more = count_work(call), count_work(replace(call, **{name: 2 * getattr(call, name)}))
    assert all(more[amount] >= less[amount] for amount in less) and more != less


def test_states_are_moved_by_a_forward_that_keeps_or_a_backward_that_does_not():
    for mode in ("fwd", "bwd"):
        for keeps in (False, True):
            work = count_work(replace(CALL, mode=mode, keeps=keeps))
            moved = (work["block_states"], work["steps"]) if keeps == (mode == "fwd") else (0, 0)
            assert (work["moved_states"], work["moved_steps"]) == moved


def inputs_on_meta(**changed) -> SSDInputs:
    """Of the sizes of CALL, but for those changed."""
    inputs = random_inputs(Shape(1, 64, 4, 64, 2, 128, 64), Case(D="h"), torch.bfloat16)
    return replace(inputs, **{name: t.to("meta") for name, t in vars(inputs).items() if isinstance(t, torch.Tensor)} | changed)


@pytest.fixture
def as_if_hopper(monkeypatch):
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    monkeypatch.setattr(hopper, "explain_missing_gluon", lambda: None)
    monkeypatch.setattr(tuning, "device_of", lambda inputs: tuning.Device("h200", 232_448))
    auto_variant._ranked.clear()
    yield
    auto_variant._ranked.clear()


class Reached(Exception):
    pass


@pytest.mark.parametrize("changed", [{}, {"D": torch.empty(4, 64, device="meta")}, {"chunk_size": 32},
                                     {"cu_seqlens": torch.empty(2, device="meta")}], ids=("plain", "D", "short", "documents"))
@pytest.mark.parametrize("options", [{}, {"gluon": False}, {"stationary": False}, {"save_states": False}], ids=str)
@pytest.mark.parametrize("name", ["fused", "persistent"])
def test_the_kernels_are_named_that_run(name, changed, options, as_if_hopper, monkeypatch):
    """The choice asks what a launch asks: whether the kernels for Hopper take the inputs."""
    def reach(reason, variant):
        raise Reached(reason)

    monkeypatch.setattr(hopper, "can_run", reach)
    inputs, options, variant = inputs_on_meta(**changed), Options(**options), get_variant(name)
    keeps = registry.find_states_interval(name, inputs, options) is not None
    calls = {"fwd": lambda: variant.forward(inputs, options, True),
             "bwd": lambda: variant.backward(SSDSaved(inputs, options), inputs.x, None, SSDGrads())}
    for mode, call in calls.items():
        with pytest.raises(Reached) as reached:
            call()
        kernels = variant.kernels(inputs, options, mode, keeps)
        assert kernels == ("fused" if mode == "bwd" else name) + (" on Hopper" if reached.value.args[0] is None else "")


def test_kernels_off_hopper():
    """Those of a persistent forward have a name of their own, which no table of a Hopper GPU has times of; a backward that is
    not fused is the baseline's.
    """
    for name, kernels in OTHERS.items():
        find = get_variant(name).kernels
        assert find(inputs_on_meta(), Options(), "fwd", False) == kernels
        assert find(inputs_on_meta(), Options(fuse_backward=False), "bwd", False) == "baseline"


def test_a_form_is_ranked_once(as_if_hopper, rank):
    """By all that kernels depend on: a second call of one form asks nothing of the variants."""
    asked = Mock(side_effect=get_variant)

    def ask(inputs, options=Options(), mode="fwd", keeps=False):  # noqa: B008  frozen
        asked.reset_mock()
        order = auto_variant.rank_variants(inputs, options, mode, keeps, CANDIDATES, asked)[0]
        return order, asked.call_count

    inputs = inputs_on_meta()
    assert ask(inputs) == (("persistent", "fused", "baseline"), 3) and ask(inputs_on_meta()) == (CANDIDATES, 0)
    for others in ({"options": Options(gluon=False)}, {"mode": "bwd"}, {"keeps": True}):
        assert ask(inputs, **others)[1] == 3
    for changed in ({"chunk_size": 128}, {"z": inputs.x}, {"D": inputs.x[0, 0]}, {"state_dtype": torch.float32}):
        assert ask(replace(inputs, **changed))[1] == 3


def rank_as(monkeypatch, *names: str) -> None:
    """These are chosen from, in this order, on a CPU as on a GPU."""
    monkeypatch.setattr(registry, "_list_choices", lambda inputs: CANDIDATES)
    monkeypatch.setattr(auto_variant, "rank_variants", lambda *_: (names, "a test says so"))


def test_candidates():
    assert list_candidates() == CANDIDATES


def test_the_next_runs_where_the_first_cannot(monkeypatch, caplog):
    made = {"persistent": Variant("persistent", lambda inputs: "too odd"), "fused": Variant("fused", lambda inputs: None)}
    monkeypatch.setattr(registry, "get_variant", made.get)
    rank_as(monkeypatch, "persistent", "fused")
    registry._say.cache_clear()
    inputs = inputs_on_meta()
    with caplog.at_level("INFO", "ssd"):
        assert registry.resolve("auto", inputs, Options(), "bwd") is made["fused"]
    assert caplog.messages == ["variant 'auto' runs 'fused' (bwd): a test says so; persistent cannot run these inputs: too odd"]
    made["fused"] = replace(made["fused"], supports=lambda inputs: "too even")
    with pytest.raises(ValueError, match=r"variant 'auto': persistent cannot .* too odd; fused cannot .* too even"):
        registry.resolve("auto", inputs, Options(), "fwd")


@without_gpu
def test_documents_with_states_go_where_they_need_no_rows(as_if_hopper, monkeypatch):
    """The forward of `persistent` takes them as they are, and either's backward; nobody does on other GPUs."""
    inputs = inputs_on_meta()
    halves = {name: getattr(inputs, name).half() for name in ("x", "B", "C")}  # which the interpreter takes
    inputs = replace(inputs, **halves, cu_seqlens=torch.empty(2, device="meta"))
    rank_as(monkeypatch, "baseline", "fused", "persistent")
    assert [registry.resolve("auto", inputs, Options(), mode).name for mode in ("fwd", "bwd")] == ["persistent", "fused"]
    monkeypatch.setattr(hopper, "is_hopper", lambda device: False)
    assert registry.resolve("auto", inputs, Options(), "fwd").name == "baseline"


@pytest.mark.parametrize("path", sorted(variant_times.TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_tables_that_are_shipped(path):
    table = TimeTable.read(path.read_text())
    assert table.write() == path.read_text()
    for call, times in table.calls.items():
        assert {(call.mode, kernels) for kernels in times} <= {*table.constants} and min(times.values()) > 0
    assert {*HOPPER.values(), *OTHERS.values(), *PLAIN} >= {kernels for _, kernels in table.constants}
    assert all({*constants} == {*count_work(CALL)} for constants in table.constants.values())


def keep(device, nbytes, monkeypatch, variant="auto", **switches):
    """The states that a call keeps, or None, and its gradients. On a CPU "auto" chooses as if on a GPU."""
    rank_as(monkeypatch, *CANDIDATES)
    inputs = leaves(random_inputs(SHAPE, Case(), torch.float32, device))
    options = Options(keep_bytes=nbytes, **switches)
    out = run(inputs, variant=variant, options=options)
    kept = [t for t in out.grad_fn.saved_tensors if t is not None and t.dim() == 5]
    grads = torch.autograd.grad(out.square().sum(), [inputs.x, inputs.B, inputs.dt])
    return kept[0] if kept else None, grads


def test_auto_keeps_what_the_budget_allows(device, monkeypatch):
    within, grads = keep(device, STATES, monkeypatch)
    assert within.nbytes == STATES
    for nbytes, switches in ((STATES - 1, {}), (0, {}), (STATES, {"save_states": False})):
        beyond, others = keep(device, nbytes, monkeypatch, **switches)
        assert beyond is None and all(map(torch.equal, grads, others))


@pytest.mark.parametrize("variant", OURS)
def test_a_variant_asked_for_by_name_has_no_budget(variant, device, monkeypatch):
    assert keep(device, 0, monkeypatch, variant)[0].nbytes == STATES
    assert keep(device, STATES, monkeypatch, variant, save_states=False)[0] is None


def test_auto_runs_a_forward_that_keeps_states_as_they_are_declared(device, monkeypatch):
    """The op says before the choice how many states there are."""
    module = sys.modules[VARIANTS["fused"].module]
    monkeypatch.setattr(module, "VARIANT", replace(module.VARIANT, states_every=lambda inputs, options: 32))
    inputs = random_inputs(SHAPE, Case(), torch.float32, device)
    rank_as(monkeypatch, "fused", "baseline")
    options = Options(keep_bytes=STATES)
    assert registry.resolve("auto", inputs, options, "fwd", True).name == "baseline"
    assert registry.resolve("auto", inputs, options, "fwd").name == "fused"
    assert registry.resolve("auto", inputs, options, "bwd", True).name == "fused"


def test_what_is_said_of_states(device, monkeypatch, caplog):
    registry._say.cache_clear()
    with caplog.at_level("INFO", "ssd"):
        keep(device, STATES, monkeypatch)
    said = [message for message in caplog.messages if message.startswith("variant 'auto'")]
    assert said == [f"variant 'auto' runs 'persistent' ({mode}, states kept): a test says so" for mode in ("fwd", "bwd")]


def test_plain_torch_keeps_nothing():
    inputs = leaves(random_inputs(SHAPE, Case(), torch.float32))
    out, named = (run(inputs, variant=variant, options=Options(keep_bytes=STATES)) for variant in ("auto", "torch"))
    assert torch.equal(out, named) and not [t for t in out.grad_fn.saved_tensors if t is not None and t.dim() == 5]


def test_a_budget_under_compile(device, monkeypatch):
    """What the op's fake says is kept is what is kept, within the budget and beyond it, in one compiled function."""
    rank_as(monkeypatch, "fused")
    torch._dynamo.reset()
    compiled = torch.compile(partial(run, variant="auto", options=Options(keep_bytes=STATES)), fullgraph=True,
                             backend="aot_eager", dynamic=True)
    for seqlen in (32, 60):
        inputs = leaves(random_inputs(replace(SHAPE, seqlen=seqlen), Case(), torch.float32, device))
        grads = [torch.autograd.grad(call(inputs).square().sum(), inputs.x)[0]
                 for call in (compiled, partial(run, variant="fused"))]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("first", OURS)
@pytest.mark.parametrize("second", OURS)
def test_a_backward_takes_what_any_forward_saved(first, second, device):
    """Since "auto" may choose another variant for each."""
    inputs = random_inputs(Shape(1, 40, 2), EVERYTHING, torch.float32, device)
    ways = cotangents(inputs)
    own, other = (get_variant(second).backward(get_variant(name).forward(inputs, Options(), True)[2], *ways, SSDGrads())
                  for name in (second, first))
    for name, grad in vars(own).items():
        torch.testing.assert_close(getattr(other, name), grad, rtol=1e-4, atol=1e-4, msg=name)
