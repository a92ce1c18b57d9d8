"""Pruned models in folders, ours and of transformers: written once, read whole, and refused by what is wrong with them."""

import copy
import json
from dataclasses import asdict

import pytest
import torch

pytest.importorskip("safetensors", reason="safetensors is not installed")

from safetensors.torch import load_file, save_file

from ssd import patch_transformers
from ssd.modules import Mamba2LM
from ssd.pruning import KINDS, choose, cut, find_blocks, is_pruned, load, load_language_model, prune, save, score_magnitude
from tests.in_torch import in_torch  # noqa: F401  a fixture
from tests.modules.test_language_model import make_model

LAYER = {"layer": "Mamba2", "d_state": 32, "headdim": 8, "chunk_size": 16, "ngroups": 2}


def make_pruned(**settings) -> Mamba2LM:
    return make_model(ssm_cfg=LAYER | settings)


@pytest.fixture
def saved(tmp_path):
    """A model without half of its states and heads, and its folder."""
    model = make_pruned()
    for kind in KINDS:
        prune(model, score_magnitude(model, kind), kind, 0.5)
    save(model, tmp_path / "pruned", asdict(model.config), ratio=0.5)
    return model, tmp_path / "pruned"


IDS = torch.arange(1, 20)[None]


@torch.no_grad()
def test_round_trip(saved):
    model, folder = saved
    read = load_language_model(folder, variant="torch")
    assert torch.equal(read(IDS), model(IDS)) and torch.equal(read.generate(IDS, 3), model.generate(IDS, 3))
    sizes = {block.nheads for block in find_blocks(read).values()}, {block.dstate for block in find_blocks(read).values()}
    assert sizes == ({4}, {16}) and is_pruned(folder) and read.lm_head.weight is read.backbone.embedding.weight
    record = json.loads((folder / "config.json").read_text())["pruning"]
    assert record["ratio"] == 0.5 and record["blocks"]["backbone.layers.1.mixer"] == {
        "nheads": 4, "headdim": 8, "ngroups": 2, "dstate": 16, "norm_eps": 2e-5}


@torch.no_grad()
def test_blocks_of_different_sizes(tmp_path):
    """Some blocks are cut, others are left: files and steps take each block's own sizes."""
    model = make_pruned()
    first, second = find_blocks(model).values()
    scores = {first.name: score_magnitude(model, "heads")[first.name]}
    cut(first, choose({first.name: first}, scores, "heads", 0.5)[first.name])
    save(model, tmp_path / "pruned", asdict(model.config))
    read = load_language_model(tmp_path / "pruned", variant="torch")
    assert [block.nheads for block in find_blocks(read).values()] == [4, 8] and second.nheads == 8
    cache = read.new_cache(1)
    steps = torch.stack([read.step(token, cache) for token in IDS.unbind(1)], 1)
    torch.testing.assert_close(steps, model(IDS), rtol=1e-4, atol=1e-4)


def test_a_pruned_model_is_not_saved_as_a_whole_one(tmp_path):
    model = make_pruned()
    prune(model, score_magnitude(model, "states"), "states", 0.5)
    with pytest.raises(ValueError, match=r"got \(.*ssd.pruning.save"):
        model.save_pretrained(tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_weights_of_numbers_that_nothing_computes_with(dtype, saved):
    _, folder = saved
    name = "backbone.layers.0.mixer.D"
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {name: weights[name].to(dtype)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{name}: got {dtype}, expected one of torch\.float16"):
        load(make_pruned(), folder)


def test_scores_that_are_none():
    with pytest.raises(TypeError, match="scores: got NoneType, expected a tensor for each block, by name"):
        prune(make_pruned(), None, "states", 0.5)


def test_no_checkpoint_is_overwritten(saved, tmp_path):
    model, folder = saved
    whole = make_pruned()
    whole.save_pretrained(tmp_path / "whole")
    for taken in (folder, tmp_path / "whole"):
        before = {path.name: path.read_bytes() for path in taken.iterdir()}
        with pytest.raises(FileExistsError, match=r"folder: got .*, which has config\.json, model\.safetensors in it"):
            save(model, taken, {})
        assert {path.name: path.read_bytes() for path in taken.iterdir()} == before


def test_what_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # which an empty path would be
    model = make_pruned()
    for call in (lambda folder: save(model, folder, {}), lambda folder: load(model, folder), load_language_model, is_pruned):
        for folder, error in ((None, TypeError), ("", ValueError)):
            with pytest.raises(error, match=f"folder: got {folder!r}, expected a path"):
                call(folder)


def test_what_does_not_fit_is_refused_and_the_model_as_it_was(saved, tmp_path):
    _, folder = saved
    with pytest.raises(ValueError, match=r"config: got pruning, that of a pruned checkpoint, expected a whole model's; ssd\."):
        Mamba2LM.from_pretrained(folder)
    make_pruned().save_pretrained(tmp_path / "whole")
    with pytest.raises(ValueError, match=r"folder: got .*whole, a checkpoint that was not pruned, expected one that ssd"):
        load_language_model(tmp_path / "whole")
    for settings, said in (
            ({"d_state": 8}, "mixer: got nheads 4, .* dstate 16 in .*, expected at most those of the model, .* dstate 8"),
            ({"headdim": 16}, "mixer: got nheads 4, headdim 8,"),
            ({"bias": True}, r"disagrees with the model about backbone\.layers\.0\.mixer\.in_proj\.bias, "),
            ({"d_conv": 3}, r"conv1d.weight: got shape \(96, 1, 4\) in .*, expected \(96, 1, 3\)")):
        other = make_pruned(**settings)
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(ValueError, match=said):
            load(other, folder)
        assert all(torch.equal(t, before[name]) for name, t in other.state_dict().items())
    record = json.loads((folder / "config.json").read_text())
    record["pruning"]["blocks"]["backbone.layers.0.mixer"]["norm_eps"] = "small"
    (folder / "config.json").write_text(json.dumps(record))
    with pytest.raises(TypeError, match=r"backbone\.layers\.0\.mixer: norm_eps: got 'small', expected a number"):
        load(make_pruned(), folder)
    (folder / "config.json").write_text(json.dumps({"pruning": {"blocks": {"a": {"nheads": 0}}}}))
    with pytest.raises(ValueError, match=r"config\.json: pruning: got no sizes of blocks, expected nheads"):
        load(make_pruned(), folder)


@torch.no_grad()
@pytest.mark.parametrize("family", ["mamba2", "falcon_h1"])
def test_models_of_transformers(family, tmp_path):
    """With and without the patch; without states their own from_pretrained reads them, without heads ours."""
    pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")
    from tests.interop.families import available, tiny, tokens

    if not available(family):
        pytest.skip(f"this transformers has no {family}")
    ids, size = tokens(2, 19), "state_size" if family == "mamba2" else "mamba_d_state"
    whole = tiny(family, **{size: 32}).eval()
    model = copy.deepcopy(whole)
    prune(model, score_magnitude(model), "states", 0.5)
    logits = model(ids, use_cache=False).logits
    with patch_transformers():
        torch.testing.assert_close(model(ids, use_cache=False).logits, logits, rtol=1e-4, atol=1e-4)
        assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 22)
    model.save_pretrained(tmp_path / "theirs")
    read = type(model).from_pretrained(tmp_path / "theirs")
    assert torch.equal(read(ids, use_cache=False).logits, logits) and getattr(read.config, size) == 16
    prune(model, score_magnitude(model, "heads"), "heads", 0.5)
    save(model, tmp_path / "ours", whole.config.to_dict())
    load(whole, tmp_path / "ours")
    assert torch.equal(whole(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
