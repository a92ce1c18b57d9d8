"""patch_transformers: models compute the same with and without it, and it comes and goes as it says."""

import importlib.util
import sys
from contextlib import ExitStack, nullcontext
from types import ModuleType

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")

import ssd
from ssd.interop import transformers as patch
from ssd.interop.patching import put
from tests.in_torch import in_torch  # noqa: F401  a fixture
from tests.interop import families
from tests.interop.families import available, step, tiny, tokens
from tests.programs import run_python

FAMILIES = [family for family in patch.FAMILIES if available(family)]
LOSS = 2e-6  # relative
GRADIENT = 2e-5  # of a gradient's norm, beside 1e-7 of the largest norm
at_import = pytest.mark.skipif(families.VERSION < (5, 15), reason="before 5.15 a model on the CPU calls no kernels")


def import_modelling(family: str) -> ModuleType:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def assert_same(got, expected):
    """Loss, logits and every gradient of two steps."""
    assert abs(got[0] - expected[0]) <= LOSS * abs(expected[0])
    torch.testing.assert_close(got[1], expected[1], rtol=1e-4, atol=1e-4)
    assert got[2].keys() == expected[2].keys()
    largest = max(gradient.norm() for gradient in expected[2].values())
    for name, gradient in expected[2].items():
        assert (got[2][name] - gradient).norm() <= GRADIENT * gradient.norm() + 1e-7 * largest, name


@pytest.fixture
def calls(monkeypatch):
    """Names of our functions that models called."""
    seen = []
    for name, function in list(patch._FUNCTIONS.items()):

        def count(*args, name=name, function=function, **kwargs):
            seen.append(name)
            return function(*args, **kwargs)

        monkeypatch.setitem(patch._FUNCTIONS, name, count)
    return seen


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients(family, train, calls, device):
    """Without `train` a model calls the convolution and the SSD by themselves, with it the two in one function."""
    model, ids = tiny(family).to(device), tokens(2, 19).to(device)
    expected = step(model, ids, train)
    assert not calls
    with ssd.patch_transformers():
        got = step(model, ids, train)
    assert_same(got, expected)
    if families.VERSION >= (5, 15):
        assert set(calls) == ({"mamba_split_conv1d_scan_combined"} if train else
                              {"causal_conv1d_fn", "mamba_chunk_scan_combined"})


@at_import
@pytest.mark.parametrize("family", FAMILIES)
def test_generation(family, calls, device):
    """The prompt leaves states in the cache, which single tokens then take further in place."""
    model, ids = tiny(family).eval().to(device), tokens(2, 7).to(device)
    settings = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(ids, **settings)
    with ssd.patch_transformers():
        got = model.generate(ids, **settings)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)
    assert {"causal_conv1d_update", "selective_state_update"} <= set(calls)


@at_import
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_in_pieces_gives_the_tokens_of_the_whole(family, calls, device):
    """All but the last piece go through the model by themselves, and `generate` takes up the cache that they leave."""
    model, ids = tiny(family).eval().to(device), tokens(2, 23).to(device)
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    name = "cache_params" if family == "mamba2" else "past_key_values"
    cache = {}
    with ssd.patch_transformers():
        for piece in ids[:, :16].split([9, 7], 1):
            with torch.no_grad():
                cache = {name: model(piece, use_cache=True, **cache)[name]}
        assert "selective_state_update" not in calls
        got = model.generate(ids, max_new_tokens=4, do_sample=False, **cache)
    assert torch.equal(got, expected)


@at_import
def test_generation_by_kernels(device, monkeypatch):
    """Of every kind, without a GPU in the interpreter; every variant generates in tests/modules/test_language_model.py."""
    monkeypatch.setattr("ssd.block.arguments.INTERPRETED", device == "cpu")
    model, ids = tiny("mamba2").eval().to(device), tokens(2, 9).to(device)
    expected = model.generate(ids, max_new_tokens=2, do_sample=False)
    with ssd.patch_transformers("fused"):
        assert torch.equal(model.generate(ids, max_new_tokens=2, do_sample=False), expected)


@at_import
@pytest.mark.parametrize("patches", (True, False))
def test_a_file_that_is_found_under_one_patch_and_runs_later(patches):
    """Another is then in force, or none."""
    name = "transformers.models.mamba2.modeling_mamba2"
    with ssd.patch_transformers():
        spec = sys.meta_path[0].find_spec(name, importlib.import_module(name.rpartition(".")[0]).__path__)
    with ssd.patch_transformers() if patches else nullcontext():
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert (module.mamba2_chunk_scan is import_modelling("mamba2").mamba2_chunk_scan) == patches


@pytest.mark.skipif(families.VERSION < (5, 17), reason="before 5.17 some families do not hand seq_idx on")
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents(family, train):
    """seq_idx keeps the documents of a row apart, in the convolution, the SSD and their gradients."""
    changes = {"layer_types": ["mamba"] * 2} if family == "granitemoehybrid" else {}  # its attention knows no documents
    model, lengths = tiny(family, **changes), (5, 1, 9, 7)
    documents = tokens(1, sum(lengths)).split(lengths, 1)
    seq_idx = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].int()
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    row = torch.cat(documents, 1)
    body = model.backbone if family == "mamba2" else model.model  # Mamba2ForCausalLM does not hand seq_idx on
    body.train(train)
    places = {"position_ids": position_ids} if family != "mamba2" else {}

    def gradients(hidden_states):
        names, parameters = zip(*body.named_parameters(), strict=True)
        found = torch.autograd.grad(hidden_states.square().mean(), parameters, allow_unused=True)
        return {name: gradient for name, gradient in zip(names, found, strict=True) if gradient is not None}

    alone = torch.cat([body(document, use_cache=False)[0] for document in documents], 1)
    expected = (alone.square().mean(), alone, gradients(alone))
    with ssd.patch_transformers():
        packed = body(row, seq_idx=seq_idx, use_cache=False, **places)[0]
        got = (packed.square().mean(), packed, gradients(packed))
        leaking = body(row, use_cache=False, **places)[0]
        with pytest.raises(ValueError, match="cu_seqlens: got a tensor without seq_idx, expected seq_idx"):
            body(row, cu_seqlens=torch.tensor([0, 5, 22]), use_cache=False, **places)
    assert_same(got, expected)
    assert not torch.allclose(leaking, alone, atol=1e-2)


@at_import
@pytest.mark.parametrize(("family", "changes", "more"), [
    *(("falcon_h1", {"mamba_rms_norm": norm, "mamba_norm_before_gate": False}, {}) for norm in (False, True)),
    ("bamba", {}, {"num_items_in_batch": torch.tensor(30), "output_attentions": False}),
], ids=("without a norm there is no epsilon", "with a norm", "keywords for others are dropped"))
def test_other_calls(family, changes, more):
    """What the model was called with reaches the mixers; a batch's number of labels is nothing to a kernel."""
    model, ids = tiny(family, **changes), tokens(2, 19)
    for train in (False, True):
        expected = step(model, ids, train, **more)
        with ssd.patch_transformers():
            assert_same(step(model, ids, train, **more), expected)


@at_import
def test_undo_restores_every_global():
    files = [import_modelling(family) for family in FAMILIES]
    before = [dict(vars(file)) for file in files]
    finders = list(sys.meta_path)
    with ssd.patch_transformers():
        for file, globals_before in zip(files, before, strict=True):
            changed = {name for name, value in vars(file).items() if globals_before.get(name) is not value}
            assert changed == set(patch._GLOBALS)
    for file, globals_before in zip(files, before, strict=True):
        assert vars(file).keys() == globals_before.keys()
        assert all(vars(file)[name] is value for name, value in globals_before.items())
    assert sys.meta_path == finders


@at_import
def test_modelling_files_imported_later(monkeypatch):
    """They are patched when they are imported, and restored with the others."""
    old = import_modelling("bamba")
    package = sys.modules["transformers.models.bamba"]
    monkeypatch.setattr(package, "modeling_bamba", old)
    monkeypatch.delitem(sys.modules, old.__name__)
    with ssd.patch_transformers():
        assert old.__name__ not in sys.modules
        new = import_modelling("bamba")
        assert new is not old and new.mamba2_chunk_scan is patch._FUNCTIONS["mamba_chunk_scan_combined"]
        assert "exec_module" not in vars(new.__spec__.loader)
    assert new.mamba2_chunk_scan.__module__ == old.__name__
    assert new.mamba2_chunk_scan.__wrapped__.__qualname__ == "mamba2_chunk_scan"


def test_files_before_5_15():
    """There a mixer's `__init__` looks kernels up and makes globals of them, which a mixer that is left needs."""
    file, undo = ModuleType("modeling_old"), ExitStack()
    load = file.lazy_load_kernel = lambda name: None
    patch._place(undo, file, (5, 14))
    assert file.is_fast_path_available and file.selective_state_update is patch._FUNCTIONS["selective_state_update"]
    put(undo, vars(file), "mamba_chunk_scan_combined", file.lazy_load_kernel("mamba-ssm").mamba_chunk_scan_combined)
    assert file.lazy_load_kernel("causal-conv1d").causal_conv1d_fn is patch._FUNCTIONS["causal_conv1d_fn"]
    assert file.lazy_load_kernel("another") is None
    undo.close()
    assert file.lazy_load_kernel is load and not file.is_fast_path_available and file.causal_conv1d_fn is None


FRESH = """
import sys, ssd
ssd.patched()
assert not {"transformers", "mamba_ssm", "ssd.block.split_conv1d_scan"} & sys.modules.keys()
patch = ssd.patch_transformers()
assert "transformers" not in sys.modules
from tests.interop.families import step, tiny, tokens
from tests.interop.test_transformers import assert_same
model, ids = tiny("mamba2"), tokens(2, 19)
got = step(model, ids, True)
patch.undo()
assert_same(got, step(model, ids, True))
"""


@at_import
def test_in_a_fresh_process():
    """ssd imports no other library; a patch put in force first works; on a CPU without Triton's interpreter too."""
    run_python("-c", FRESH)
