"""What "auto" chooses, as if on GPUs that are not here: by the nearest measured call, else by the rule."""

import json
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from ssd import auto_variant, registry, ssd_chunk_scan
from ssd.auto_variant import Measured
from ssd.registry import Variant, get_variant, list_candidates
from ssd.runtime import tuning
from ssd.types import Options, SSDGrads
from ssd.variants import VARIANTS
from tests.errors import cotangents
from tests.inputs import EVERYTHING, OURS, Case, Shape, arguments, leaves, random_inputs

CANDIDATES = ("persistent", "fused", "baseline")
TABLE = {
    "fwd/2B/64/128/512/4096/128": ["persistent", "fused", "baseline"],
    "fwd/2B/64/128/24/512/128": ["fused", "baseline"],
    "fwd/2B/64/128/24/512/256": ["baseline", "fused"],
    "bwd/2B/64/128/512/4096/128": ["baseline", "persistent"],
}
SHAPE = Shape(2, 70, 4, 16, 2, 16, 16)  # 5 chunks
STATES = 2 * 5 * 4 * 16 * 16 * 4  # bytes


def run(inputs, **options):
    return ssd_chunk_scan(**arguments(inputs) | options)


@pytest.fixture
def on(monkeypatch, tmp_path):
    """The order on a GPU of that compute capability, with TABLE measured on an h200."""
    (tmp_path / "h200.json").write_text(json.dumps(TABLE))
    monkeypatch.setattr(auto_variant, "TABLES", tmp_path)

    def order(*sizes, device="h200", capability=(9, 0)):
        monkeypatch.setattr(tuning, "current_device", lambda index: tuning.Device(device, 232_448))
        monkeypatch.setattr(auto_variant, "is_hopper", lambda device: capability[0] == 9)
        auto_variant._rank.cache_clear(), auto_variant._table.cache_clear()
        return auto_variant._rank(CANDIDATES, get_variant, 0, *sizes)

    yield order
    auto_variant._rank.cache_clear(), auto_variant._table.cache_clear()


@pytest.mark.parametrize(
    "sizes, expected",
    [
        (("fwd", 2, 64, 128, 512, 4096, 128), ("persistent", "fused", "baseline")),  # as measured
        (("fwd", 2, 64, 128, 128, 8192, 128), ("persistent", "fused", "baseline")),  # three doublings off, the others 6.4
        (("fwd", 2, 64, 128, 32, 300, 128), ("fused", "baseline", "persistent")),  # what was not measured comes last
        (("fwd", 2, 64, 128, 32, 300, 256), ("baseline", "fused", "persistent")),  # the chunk size counts
        (("bwd", 2, 64, 128, 1, 16, 16), ("baseline", "persistent", "fused")),  # the mode counts
    ],
)
def test_nearest_measured_call(on, sizes, expected):
    order, why = on(*sizes)
    assert order == expected and "fastest of" in why and "h200" in why


@pytest.mark.parametrize("sizes", [("fwd", 4, 64, 128), ("fwd", 2, 32, 128), ("fwd", 2, 64, 64)], ids=str)
def test_other_sizes_are_not_compared(on, sizes):
    order, why = on(*sizes, 512, 4096, 128)
    assert order == CANDIDATES and "no forward of such sizes" in why


def test_a_backward_that_nobody_measured(on):
    """On Hopper there are kernels for the sizes of models, which any rows of a H200 would put first."""
    for sizes, capability in (((4, 64, 128), (9, 0)), ((2, 128, 128), (9, 0)), ((2, 64, 128), (8, 0))):
        order, why = on("bwd", *sizes, 512, 4096, 128, device="other", capability=capability)
        assert order == CANDIDATES[::-1] and "no backward" in why
    order, why = on("bwd", 2, 64, 128, 512, 4096, 128, device="h100")
    assert order == CANDIDATES and "no backward of such sizes was measured on h100" in why


def test_candidates():
    assert list_candidates() == CANDIDATES


def test_rule_without_rows(on):
    sizes = ("fwd", 2, 64, 128, 512, 4096, 128)
    assert on(*sizes, device="h100")[0] == ("persistent", "fused", "baseline")
    order, why = on(*sizes, device="a100", capability=(8, 0))
    assert order == ("fused", "baseline") and "a100; fused is expected" in why


def test_the_next_runs_where_the_first_cannot(monkeypatch, caplog):
    made = {"persistent": Variant("persistent", lambda inputs: "too odd"), "fused": Variant("fused", lambda inputs: None)}
    monkeypatch.setattr(registry, "get_variant", made.get)
    monkeypatch.setattr(auto_variant, "rank_variants", lambda *_: (("persistent", "fused"), "a test says so"))
    registry._say.cache_clear()
    with caplog.at_level("INFO", "ssd"):
        assert registry.resolve("auto", None, Options(), "bwd") is made["fused"]
    assert caplog.messages == ["variant 'auto' runs 'fused' (bwd): a test says so; persistent cannot run these inputs: too odd"]
    made["fused"] = replace(made["fused"], supports=lambda inputs: "too even")
    with pytest.raises(ValueError, match=r"variant 'auto': persistent cannot .* too odd; fused cannot .* too even"):
        registry.resolve("auto", None, Options(), "fwd")


@pytest.mark.parametrize("path", sorted(auto_variant.TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_tables_that_are_shipped(path):
    for key, order in json.loads(path.read_text()).items():
        assert Measured.of_key(key).key() == key and len(order) > 1 and {*order} <= {*CANDIDATES}


def keep(device, nbytes, monkeypatch, variant="auto", **switches):
    """The states that a call keeps, and its gradients: (those of the states as saved, or None; gradients by name). On a CPU
    "auto" chooses as if on a GPU.
    """
    monkeypatch.setattr(registry, "_list_choices", lambda inputs: list_candidates())
    monkeypatch.setattr(auto_variant, "rank_variants", lambda *_: (CANDIDATES, "a test says so"))
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
    monkeypatch.setattr(registry, "_list_choices", lambda inputs: list_candidates())
    monkeypatch.setattr(auto_variant, "rank_variants", lambda *_: (("fused", "baseline"), "a test says so"))
    options = Options(keep_bytes=STATES)
    assert registry.resolve("auto", inputs, options, "fwd", True).name == "baseline"
    assert registry.resolve("auto", inputs, options, "fwd").name == "fused"
    assert registry.resolve("auto", inputs, options, "bwd", True).name == "fused"


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_budget_under_compile(dynamic, device, monkeypatch):
    """What the op's fake says is kept is what is kept, within the budget and beyond it, in one compiled function."""
    monkeypatch.setattr(registry, "_list_choices", lambda inputs: list_candidates())
    monkeypatch.setattr(auto_variant, "rank_variants", lambda *_: (("fused",), "a test says so"))
    torch._dynamo.reset()
    compiled = torch.compile(partial(run, variant="auto", options=Options(keep_bytes=STATES)), fullgraph=True,
                             backend="aot_eager", dynamic=dynamic)
    for seqlen in (64, 70, 90):
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
