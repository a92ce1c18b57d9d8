"""Files of weights that are cut, damaged or of another kind: refused by their names, whatever torch and safetensors raise."""

import io
import json
import os
import pickle
import random
import tarfile

import pytest
import torch

pytest.importorskip("safetensors", reason="safetensors is not installed")

from safetensors.torch import save_file

from ssd.modules import Mamba2LM, checkpoint
from tests.modules.test_checkpoint import HEAD, INDEX, LEGACY, NORM, PICKLE, WHOLE, folder, shards, weights


class Malicious:
    """Makes a folder where it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("victim",)


def tar(path):
    """As torch wrote files before 0.1.12."""
    with tarfile.open(path, "w") as file:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            content = pickle.dumps({})
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            file.addfile(entry, io.BytesIO(content))


@pytest.mark.parametrize(("write", "message"), [
    (lambda path: path.write_bytes(b""), "got an empty file, expected a state dict"),
    (lambda path: path.write_bytes(b"PK\x03\x04"), "torch cannot read it: .*; it is cut"),
    (tar, r"torch cannot read it: RuntimeError"),
    (lambda path: torch.save(torch.nn.Linear(1, 1), path, **LEGACY), "refused, for it holds more than tensors"),
    (lambda path: path.write_bytes(pickle.dumps(Malicious())), "refused, for it holds more than tensors"),
    (lambda path: torch.save(weights() | {HEAD: Malicious()}, path), "refused, for it holds more than tensors"),
    (lambda path: torch.save([torch.ones(1)], path), "got list of more than tensors"),
    (lambda path: torch.save({1: torch.ones(1)}, path), "got a tensor under 1, expected names"),
    (lambda path: torch.save({"model": {NORM: torch.ones(1)}}, path), "got dict of more than tensors"),
    (lambda path: torch.save({NORM: torch.eye(2).to_sparse()}, path), f"{NORM}: got a torch.sparse_coo tensor on cpu"),
], ids=("empty", "a zip's first bytes", "tar", "a legacy module", "a bare pickle", "a tensor that is none",
        "a list", "numbers for names", "nested", "sparse"))
@pytest.mark.filterwarnings("ignore")
def test_pickles_of_other_kinds(write, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / PICKLE)
    with pytest.raises(ValueError, match=rf"pytorch_model\.bin: {message}"):
        Mamba2LM.from_pretrained(folder(tmp_path))
    assert not (tmp_path / "victim").exists()


def damage(whole: bytes, draw: random.Random):
    """The file cut everywhere, and with bits flipped."""
    step = max(1, len(whole) // 150)
    yield from (whole[:length] for length in sorted({*range(0, len(whole), step), 1, 2, 3, len(whole) - 1}))
    for _ in range(400):
        flipped = bytearray(whole)
        for _ in range(draw.choice((1, 1, 1, 4))):
            flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
        yield bytes(flipped)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ("zip", "legacy", "safetensors", "shard", "index"))
def test_damage_anywhere(kind, tmp_path):
    """Is refused by the file's name, or goes unseen: a bit of a number, a letter of a name; nothing else is ever raised."""
    small = {name: torch.randn(5, dtype=dtype) for name, dtype in (("a", torch.float32), ("b", torch.float16))}
    small["tied"] = small["a"].clone()
    name = {"zip": PICKLE, "legacy": PICKLE, "safetensors": WHOLE, "shard": "one", "index": INDEX}[kind]
    if name == PICKLE:
        torch.save(small, tmp_path / name, **(LEGACY if kind == "legacy" else {}))
    else:
        save_file(small, tmp_path / ("one" if kind == "index" else name))
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(small, "one")}))
    path, refused, read = tmp_path / name, 0, 0
    for content in damage(path.read_bytes(), random.Random(0)):
        path.write_bytes(content)
        try:
            found = checkpoint.read_weights(tmp_path)
        except ValueError as error:
            named = (name, INDEX) if kind == "shard" else (name, "one") if kind == "index" else (name,)
            assert str(error).startswith(tuple(f"{tmp_path / file}: " for file in named)), error
            refused += 1
        except FileNotFoundError as error:
            assert kind == "index" and str(error).startswith(f"{path}: got the file"), error
            refused += 1
        else:
            assert isinstance(found, dict) and all(isinstance(t, torch.Tensor) for t in found.values())
            read += 1
    assert refused > 150 and refused > read / 3


@pytest.mark.parametrize("shard", ("..", ".", "", "../one", "/etc/passwd", "a/one", "one/", "..\\one", "C:\\one", "one\0"))
def test_shards_are_beside_their_index(shard, tmp_path):
    """Nothing outside of the folder is looked at, whatever an index that was downloaded says."""
    inside = tmp_path / "inside"
    inside.mkdir()
    shards(folder(inside), weights())
    save_file(weights(), tmp_path / "one")
    (inside / INDEX).write_text(json.dumps({"weight_map": {NORM: shard}}))
    with pytest.raises(ValueError, match=r"index\.json: got the file .*, expected names of files beside it"):
        Mamba2LM.from_pretrained(inside)
