"""Folders of checkpoints: written and read, read as others write them, and refused whole by what is wrong with them."""

import json
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

pytest.importorskip("safetensors", reason="safetensors is not installed")

from safetensors.torch import load_file, save_file

from ssd.modules import Mamba2LM
from ssd.modules.checkpoint import read_config, read_weights, write
from tests.modules import test_language_config
from tests.modules.test_language_model import LAYER, make_model, over_settings

EMBEDDING, HEAD, NORM = "backbone.embedding.weight", "lm_head.weight", "backbone.norm_f.weight"
WHOLE, INDEX, PICKLE = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
LEGACY = {"_use_new_zipfile_serialization": False}
PUBLISHED = test_language_config.PUBLISHED | {
    "d_model": 16, "n_layer": 1, "vocab_size": 30, "ssm_cfg": LAYER}
MIXER = {  # shapes at these sizes: d_inner 32, 4 heads, 64 channels convolved
    "dt_bias": (4,), "A_log": (4,), "D": (4,), "in_proj.weight": (100, 16), "conv1d.weight": (64, 1, 4), "conv1d.bias": (64,),
    "norm.weight": (32,), "out_proj.weight": (16, 32),
}


def weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """By state-spaces' names, the tied head among them."""
    shapes = {EMBEDDING: (32, 16), "backbone.layers.0.norm.weight": (16,), NORM: (16,),
              **{f"backbone.layers.0.mixer.{name}": shape for name, shape in MIXER.items()}}
    made = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    return made | {HEAD: made[EMBEDDING].clone()}


def folder(tmp_path, written: dict[str, torch.Tensor] | None = None, **changes):
    """With a config.json, and weights if there are any."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | changes))
    if written is not None:
        save_file(written, tmp_path / WHOLE)
    return tmp_path


def shards(tmp_path, written: dict[str, torch.Tensor]) -> dict[str, str]:
    """Two, and their index; returns its map."""
    names = sorted(written)
    shard_of = {name: f"model-0000{1 + (n > 5)}-of-00002.safetensors" for n, name in enumerate(names)}
    for shard in set(shard_of.values()):
        save_file({name: written[name] for name in names if shard_of[name] == shard}, tmp_path / shard)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": shard_of}))
    return shard_of


def assert_has(model: Mamba2LM, expected: dict[str, torch.Tensor]):
    got = model.state_dict()
    assert got.keys() == expected.keys()
    for name, t in expected.items():
        assert got[name].dtype == t.dtype and torch.equal(got[name], t), name


@over_settings
def test_round_trip(settings, tmp_path):
    model = make_model(**settings)
    model.save_pretrained(tmp_path / "a" / "b")
    read = Mamba2LM.from_pretrained(str(tmp_path / "a" / "b"), variant="torch")
    assert_has(read, model.state_dict())
    assert read.config == model.config and {layer.mixer.variant for layer in read.backbone.layers} == {"torch"}
    assert (read.lm_head.weight is read.backbone.embedding.weight) == model.config.tie_embeddings
    assert (HEAD in load_file(tmp_path / "a" / "b" / WHOLE)) != model.config.tie_embeddings
    assert all(parameter.requires_grad for parameter in read.parameters())
    mixer = read.backbone.layers[1].mixer
    assert all(parameter._no_weight_decay for parameter in (mixer.dt_bias, mixer.A_log, mixer.D))


def leave_out(name: str):
    return lambda w: {other: t for other, t in w.items() if other != name}


@pytest.mark.parametrize("write", [
    lambda path, w: save_file(w, path / WHOLE), lambda path, w: save_file(leave_out(HEAD)(w), path / WHOLE), shards,
    lambda path, w: torch.save(w | {HEAD: w[EMBEDDING]}, path / PICKLE), lambda path, w: torch.save(w, path / PICKLE, **LEGACY),
], ids=("whole", "without the head", "shards", "a pickle with a tied head", "a legacy pickle"))
def test_weights_by_state_spaces_names(write, tmp_path):
    expected = weights()
    write(folder(tmp_path), expected)
    model = Mamba2LM.from_pretrained(tmp_path)
    assert_has(model, expected)
    assert model.lm_head.weight is model.backbone.embedding.weight
    assert model.generate(torch.tensor([[1, 2, 3]]), 2).shape == (1, 5)


def test_dtypes_and_devices(tmp_path, device):
    """The file's unless one is given, which leaves D in fp32 as in a block made in it."""
    expected = weights(torch.float16)
    assert_has(Mamba2LM.from_pretrained(folder(tmp_path, expected)), expected)
    model = Mamba2LM.from_pretrained(tmp_path, dtype=torch.bfloat16, device=device)
    assert {parameter.device.type for parameter in model.parameters()} == {device}
    dtypes = {name: torch.float32 if name.endswith(".D") else torch.bfloat16 for name in expected}
    assert_has(model.cpu(), {name: t.to(dtypes[name]) for name, t in expected.items()})
    with pytest.raises(TypeError, match=r"dtype: got torch\.int8, expected one of torch\.float16"):
        Mamba2LM.from_pretrained(tmp_path, dtype=torch.int8)


def test_what_is_not_there(tmp_path):
    for name, message in (("none", "expected a folder that exists; .* hf download OWNER/NAME --local-dir FOLDER"),
                          ("", r"expected a config\.json in it")):
        with pytest.raises(FileNotFoundError, match=f"folder: got .*, {message}"):
            Mamba2LM.from_pretrained(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"weights in it: model\.safetensors, .*index\.json or pytorch_model\.bin"):
        Mamba2LM.from_pretrained(folder(tmp_path))


@pytest.mark.parametrize(("device", "error"), [("gpu", ValueError), ("cuda:99", ValueError), (3.5, TypeError)])
def test_devices_that_are_not_there(device, error, tmp_path):
    with pytest.raises(error, match=f"device: got {device!r}, expected one that torch has here: "):
        Mamba2LM.from_pretrained(tmp_path, device=device)


def test_what_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # which an empty path would be
    (tmp_path / "file").touch()
    for name in ("file", "file/below"):
        with pytest.raises(FileExistsError, match=r"folder: got .*, expected a folder or a path to make one at"):
            make_model().save_pretrained(tmp_path / name)
    for call in (make_model().save_pretrained, Mamba2LM.from_pretrained):
        with pytest.raises(TypeError, match="folder: got 5, expected a path"):
            call(5)
        with pytest.raises(ValueError, match="folder: got '', expected a path that is not empty"):
            call("")


def test_without_safetensors(tmp_path, monkeypatch):
    expected = weights()
    folder(tmp_path, expected)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for call in (lambda: Mamba2LM.from_pretrained(tmp_path), lambda: make_model().save_pretrained(tmp_path)):
        with pytest.raises(ImportError, match=r"safetensors is not installed.*pip install safetensors"):
            call()
    (tmp_path / WHOLE).unlink()
    torch.save(expected, tmp_path / PICKLE)
    assert_has(Mamba2LM.from_pretrained(tmp_path), expected)


@pytest.mark.parametrize(("change", "message"), [
    (leave_out(NORM), f"weights: got none for {NORM}, expected all of the model's 11"),
    (leave_out(EMBEDDING), f"weights: got none for {EMBEDDING}"),
    (lambda w: {}, "weights: got none for backbone.embedding.weight, .* and 7 more"),
    (lambda w: w | {"backbone.layers.1.norm.weight": w[NORM].clone()},
     "weights: got backbone.layers.1.norm.weight, expected only those of the model"),
    (lambda w: w | {NORM: torch.ones(17)}, rf"{NORM}: got shape \(17,\), expected \(16,\) by the config"),
    (lambda w: w | {NORM: torch.ones(16, dtype=torch.int32)}, f"{NORM}: got torch.int32, expected one of torch.float16"),
    (lambda w: w | {HEAD: w[HEAD] + 1}, f"{HEAD}: got other numbers than {EMBEDDING} has, expected the same"),
    (lambda w: w | {HEAD: w[HEAD].half()}, f"{HEAD}: got other numbers than {EMBEDDING}"),
])
def test_other_weights_than_the_models(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Mamba2LM.from_pretrained(folder(tmp_path, change(weights())))


def test_shards_that_do_not_agree_with_their_index(tmp_path):
    expected = weights()
    shard_of = shards(folder(tmp_path), expected)
    for changed, message in (
        ({**shard_of, "more": shard_of[HEAD]}, "disagrees with its files about more$"),
        (leave_out(HEAD)(shard_of), f"disagrees with its files about {HEAD}$"),
        ({**shard_of, HEAD: shard_of[EMBEDDING]}, f"disagrees with its files about {HEAD}$"),
        ({**shard_of, HEAD: 1}, "got no weight_map"),
        (None, "got no weight_map, expected one, of the weights' names to their files' names"),
    ):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(ValueError, match=rf"index\.json: {message}"):
            Mamba2LM.from_pretrained(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": shard_of}))
    (tmp_path / shard_of[HEAD]).unlink()
    with pytest.raises(FileNotFoundError, match=shard_of[HEAD]):
        Mamba2LM.from_pretrained(tmp_path)


def test_what_the_config_does_not_say_is_not_written(tmp_path):
    tied_by_hand, added = make_model(tie_embeddings=False), make_model()
    tied_by_hand.lm_head.weight = tied_by_hand.backbone.embedding.weight
    added.adapter = torch.nn.Linear(2, 2)
    for model, names in ((tied_by_hand, r"lm_head\.weight"), (added, r"adapter\.bias, adapter\.weight")):
        with pytest.raises(ValueError, match=f"model: disagrees with its config about {names}$"):
            model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_weights_without_numbers_are_not_written(tmp_path):
    model = make_model()
    model.backbone.norm_f.to("meta")
    with pytest.raises(ValueError, match=f"{NORM}: got a tensor on the meta device, which has no numbers, expected one that"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


OLD, NEW = ({"n": n} for n in range(2))


def write_number(folder, config):
    write(folder, config, {"w": torch.full((2,), float(config["n"]))})


def read_numbers(folder) -> tuple[int, set[float]]:
    """Of the config, and of the weights."""
    return read_config(folder)["n"], {*read_weights(folder)["w"].tolist()}


def test_a_config_that_json_does_not_hold_leaves_what_was(tmp_path):
    write_number(tmp_path, OLD)
    for folder in (tmp_path, tmp_path / "saved"):
        with pytest.raises(TypeError, match="config: got what JSON does not hold"):
            write_number(folder, NEW | {"dtype": torch.float32})
    assert read_numbers(tmp_path) == (0, {0.0}) and not (tmp_path / "saved").exists()


def fail(*args, **kwargs):
    raise OSError("no space left")


def write_half(tensors, path, metadata):
    path.write_bytes(b"half")
    fail()


def replace_all_but(name):
    def replace_others(old, new, replace=os.replace):
        if os.path.basename(new) == name:
            fail()
        replace(old, new)

    return replace_others


@pytest.mark.parametrize("over", (True, False), ids=("over an old one", "first"))
@pytest.mark.parametrize(("target", "broken"), [
    ("safetensors.torch.save_file", write_half), ("pathlib.Path.write_text", fail), ("os.fsync", fail),
    ("os.replace", replace_all_but(WHOLE)), ("os.replace", replace_all_but("config.json")),
], ids=("write weights", "write config", "flush", "replace weights", "replace config"))
def test_a_write_that_fails_leaves_what_was(target, broken, over, tmp_path, monkeypatch):
    if over:
        write_number(tmp_path, OLD)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with monkeypatch.context() as patched, pytest.raises(OSError, match="no space left"):
        patched.setattr(target, broken)
        write_number(tmp_path, NEW)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    write_number(tmp_path, NEW)
    assert read_numbers(tmp_path) == (1, {1.0}) and {path.name for path in tmp_path.iterdir()} == {WHOLE, "config.json"}


@pytest.mark.parametrize(("behind", "after"), (("config.json", 0), (WHOLE, 1)))
def test_an_interruption_behind_a_step_leaves_files_of_one_model(behind, after, tmp_path, monkeypatch):
    def replace_and_interrupt(old, new, replace=os.replace):
        replace(old, new)
        if os.path.basename(new) == behind and os.path.basename(old) == behind:
            raise KeyboardInterrupt

    write_number(tmp_path, OLD)
    monkeypatch.setattr("os.replace", replace_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_number(tmp_path, NEW)
    assert read_numbers(tmp_path) == (after, {float(after)})


@pytest.mark.parametrize("name", (WHOLE, "config.json"))
def test_a_folder_where_a_file_goes_is_refused(name, tmp_path):
    write_number(tmp_path, OLD)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    (other,) = {WHOLE, "config.json"} - {name}
    before = (tmp_path / other).read_bytes()
    with pytest.raises(IsADirectoryError, match=f"folder: got .*, whose {name} is a folder, expected a file or nothing there"):
        write_number(tmp_path, NEW)
    assert (tmp_path / other).read_bytes() == before and len([*tmp_path.iterdir()]) == 2


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_modes_are_those_of_ordinary_files_or_of_what_was_there(tmp_path):
    (tmp_path / "ordinary").touch()

    def list_modes():
        return [(tmp_path / name).stat().st_mode & 0o777 for name in (WHOLE, "config.json")]

    write_number(tmp_path, OLD)
    assert list_modes() == [(tmp_path / "ordinary").stat().st_mode & 0o777] * 2
    (tmp_path / WHOLE).chmod(0o664)
    (tmp_path / "config.json").chmod(0o640)
    write_number(tmp_path, NEW)
    assert list_modes() == [0o664, 0o640] and read_numbers(tmp_path) == (1, {1.0})


def test_threads_that_write_to_one_folder(tmp_path, monkeypatch):
    """Both end well, and what is there is of one of them."""
    replace, draw = os.replace, random.Random(0)

    def replace_slowly(old, new):
        replace(old, new)
        time.sleep(draw.uniform(0, 0.01))

    monkeypatch.setattr("os.replace", replace_slowly)
    for _ in range(5):
        with ThreadPoolExecutor(2) as threads:
            assert [*threads.map(partial(write_number, tmp_path), (OLD, NEW))] == [None, None]  # or raises what one raised
        n, numbers = read_numbers(tmp_path)
        assert numbers == {float(n)}
