"""Images and their classes: made-up ones as they are described, files in folders, what of them is refused, and augmentation."""

import math
import random
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from experiments.workloads.images import load_images
from experiments.workloads.synthetic_images import LARGEST, SyntheticImages
from tests.experiments.small import vision_sizes

SIZES = vision_sizes()
COLOURS = {"ant": (250, 10, 10), "bee": (10, 250, 10), "cat": (10, 10, 250)}


def folder(path, count=3, size=(40, 60)):
    """Of three classes, each with so many images of one colour, the left half brighter."""
    for name, colour in COLOURS.items():
        (path / name).mkdir(parents=True)
        for number in range(count):
            image = Image.new("RGB", size, tuple(channel // 2 for channel in colour))
            image.paste(colour, (0, 0, size[0] // 2, size[1]))
            image.save(path / name / f"{number}.{'png' if number else 'JPEG'}")
    return path


def assert_same(sample, other):
    assert sample.keys() == other.keys() and all(torch.equal(t, other[name]) for name, t in sample.items())


@pytest.mark.parametrize("made_up", [True, False])
def test_a_sample_is_the_same_whoever_asks(tmp_path, made_up):
    data = "synthetic" if made_up else str(folder(tmp_path))
    first, second = load_images(data, SIZES, 0), load_images(data, SIZES, 0)
    second[17], second[3]
    assert_same(first[5], second[5])
    assert not torch.equal(first[5]["image"], first[6]["image"])
    assert not torch.equal(first[5]["image"], load_images(data, SIZES, 1)[5]["image"])
    sample = first[0]
    assert sample["image"].shape == (3, 32, 32) and sample["image"].dtype == torch.uint8
    assert sample["label"].shape == () and sample["label"].dtype == torch.int64


def test_made_up_images_show_their_class():
    source = SyntheticImages(LARGEST, 64, 0)
    errors, areas, seen = [], {}, {}
    for number in range(600):
        image, label = source.image(number)
        palette, orientation, shape = label % 5, label // 5 % 5, label // 25
        seen.setdefault(palette, []).append(image.reshape(-1, 3).mean(0))
        # what is not ground is the shape; its stripes are where brightness changes, which squares of slopes tell from noise
        ground = np.median(image[[0, -1]].reshape(-1, 3), 0)
        is_shape = abs(image - ground).max(-1) > 30
        areas.setdefault(shape, []).append(is_shape.mean())
        grey = np.where(is_shape, image.mean(-1), np.nan)
        y, x = np.gradient(grey)
        x, y = (np.where(np.isfinite(x + y), slope, 0) for slope in (x, y))
        angle = math.atan2(2 * (x * y).sum(), (x * x - y * y).sum()) / 2
        errors.append((angle - math.pi * orientation / 5 + math.pi / 2) % math.pi - math.pi / 2)
    assert np.quantile(np.abs(errors), 0.9) < math.pi / 10, "stripes run as the class says"
    means = {palette: np.mean(colours, 0) for palette, colours in seen.items()}
    nearest = [min(means, key=lambda p: np.abs(means[p] - colour).sum()) == palette
               for palette, colours in seen.items() for colour in colours]
    assert len(means) == 5 and np.mean(nearest) > 0.9, "colours are of the palette"
    square, disc, cross, triangle = (np.mean(areas[shape]) for shape in (1, 0, 3, 2))
    assert min(disc, square) > cross > triangle


def test_folders_are_read_whole_once_an_epoch(tmp_path):
    (folder(tmp_path / "train") / ".hidden").mkdir()
    (tmp_path / "train" / "ant" / "notes.txt").write_text("no image")
    data = load_images(str(tmp_path), SIZES, 0)
    assert data.source.files == sorted(data.source.files) and len(data.source.files) == 9
    order = []
    for number in range(18):
        sample = data[number]
        assert sample["image"].float().mean((1, 2)).argmax() == sample["label"], "classes are in the order of names"
        order.append(data.source._epochs.place(number))
    assert sorted(order[:9]) == sorted(order[9:]) == list(range(9)) and order[:9] != order[9:]
    assert_same(load_images(str(tmp_path / "train"), SIZES, 0)[11], data[11])


@pytest.mark.parametrize("name, content, said", [
    ("1.jpg", b"", r"bee/1\.jpg cannot be read as an image \(it is empty\)"),
    ("1.png", b"no image at all" * 10, r"bee/1\.png cannot be read as an image \(cannot identify"),
    ("1.PNG", "cut", r"bee/1\.PNG cannot be read as an image \(.+\)"),
    ("1.jpeg", "cut", r"bee/1\.jpeg cannot be read as an image \(image file is truncated"),
    ("1.txt", b"text", r"bee has no \.jpg, \.jpeg, \.png file in it, expected an image of its class"),
])
def test_bad_files_are_named(tmp_path, name, content, said):
    (tmp_path / "bee").mkdir()
    if content == "cut":
        noise = Image.fromarray(np.random.default_rng(0).integers(256, size=(40, 40, 3), dtype=np.uint8))
        noise.save(tmp_path / "bee" / name)
        content = (tmp_path / "bee" / name).read_bytes()[:900]
    (tmp_path / "bee" / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"^--data: .*{said}"):
        load_images(str(tmp_path), SIZES, 0)[0]


def test_grey_and_transparent_images_are_read(tmp_path):
    (tmp_path / "bee").mkdir()
    Image.new("L", (5, 300), 200).save(tmp_path / "bee" / "grey.png")
    Image.new("RGBA", (300, 1), (200, 200, 200, 0)).save(tmp_path / "bee" / "clear.png")
    data = load_images(str(tmp_path), SIZES, 0)
    assert all((data[n]["image"] == 200).all() for n in range(20))


def test_missing_data_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--data: got 'imagenet', where nothing is, expected synthetic, or a folder"):
        load_images("imagenet", SIZES, 0)
    (tmp_path / "file.jpg").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"--data: got '.*file\.jpg', which is no folder"):
        load_images(str(tmp_path / "file.jpg"), SIZES, 0)
    with pytest.raises(ValueError, match=rf"--data: {tmp_path} has no folder in it, expected one for each class"):
        load_images(str(tmp_path), SIZES, 0)
    with pytest.raises(ValueError, match=rf"--data: {tmp_path} has 3 folders, expected at most 2, the classes of the preset"):
        load_images(str(folder(tmp_path)), vision_sizes(classes=2), 0)


@pytest.mark.parametrize("missing, augment, said", [
    ("timm.data", True, r"timm, which augments images, cannot be imported \(.+\): pip install timm torchvision, or --data"),
    ("PIL.Image", False, r"PIL, which reads images, cannot be imported \(.+\): pip install pillow, or --data synthetic")])
def test_missing_packages_are_named(tmp_path, monkeypatch, missing, augment, said):
    path = str(folder(tmp_path))
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=said):
        load_images(path, vision_sizes(augment=augment), 0)
    assert "augmented" not in load_images("synthetic", vision_sizes(augment=augment), 0)[0]


@pytest.fixture
def timm():
    """With what it needs; a torchvision built for another torch raises RuntimeError."""
    return pytest.importorskip("timm.data", exc_type=(ImportError, RuntimeError))


def test_rand_augment_is_drawn_by_number(timm, tmp_path):
    path = str(folder(tmp_path))
    data, plain = (load_images(path, vision_sizes(augment=augment), 0) for augment in (True, False))
    states = random.getstate(), np.random.get_state()[1].tolist()
    samples = [data[n] for n in range(20)]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states
    random.seed(1)
    np.random.seed(1)
    assert_same(load_images(path, vision_sizes(augment=True), 0)[7], samples[7])
    assert sum(not torch.equal(sample["image"], plain[n]["image"]) for n, sample in enumerate(samples)) > 10
    assert "augmented" in samples[0] and "augmented" not in plain[0]
