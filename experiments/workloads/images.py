"""Images with their classes, from what --data names: made up, or files in folders."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..packages import import_package
from ..terminal import first_line
from . import augmentation
from .epochs import Epochs
from .synthetic_images import LARGEST, SyntheticImages
from .vision_model import VisionSizes

if TYPE_CHECKING:
    from PIL.Image import Image

SMOOTHING = 0.1  # of labels, as the published training has it
_SUFFIXES = (".jpg", ".jpeg", ".png")
_AREA, _RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


class Images(Dataset):
    """Sample n as image, (3, size, size) uint8, and label, its class, int64.

    Args:
        source: its `image(n)` gives pixels, (size, size, 3) uint8, and their class.
        classes: that the model tells apart.
        augmented: samples say so, by an entry of this name, to the loss, which then mixes them; see `augmentation.mix`.

    Attributes:
        floor: as `registry.Workload.dataset` has it: the entropy of the smoothed label. Mixing only adds to it.
    """

    def __init__(self, source: SyntheticImages | ImageFolder, classes: int, augmented: bool = False):
        self.source, self.augmented = source, augmented
        self.samples = len(source.files) if isinstance(source, ImageFolder) else None
        wrong = SMOOTHING / classes
        right = 1 - SMOOTHING + wrong
        self.floor = -right * math.log(right) - (classes - 1) * wrong * math.log(wrong)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        pixels, label = self.source.image(number)
        sample = {"image": torch.from_numpy(pixels).permute(2, 0, 1), "label": torch.tensor(label)}
        return sample | {"augmented": torch.tensor(True)} if self.augmented else sample


class ImageFolder:
    """JPEG and PNG files in a folder for each class, in an order drawn anew for each epoch.

    Of each a part is taken that has from 8 to 100 % of the area and is 3/4 to 4/3 as wide as high (arXiv:1409.4842, section 6),
    cut off where the image ends, and in half of the times it is flipped.

    Args:
        path: folder of the classes' folders, or with them in its folder `train`; classes are numbered in the order of names.
        classes: how many there may be.
        size: pixels of a side, to which the part is scaled.
        seed: of the order and the parts.
        augment: RandAugment besides.

    Raises:
        FileNotFoundError, ValueError: naming the folder, and what is wrong with it.
        ImportError: Pillow is missing, or timm where it is to augment.
    """

    def __init__(self, path: Path, classes: int, size: int, seed: int, augment: bool):
        folders = _class_folders(path, classes)
        self._pillow = import_package("PIL.Image", "reads images", "pip install pillow, or --data synthetic")
        self._augment = augmentation.rand_augment(size) if augment else None
        self.size, self.seed = size, seed
        self.files, self.labels = [], []
        for label, folder in enumerate(folders):
            names = sorted(name for name in os.listdir(folder) if name.lower().endswith(_SUFFIXES))
            if not names:
                raise ValueError(f"--data: {folder} has no {', '.join(_SUFFIXES)} file in it, expected an image of its class")
            self.files += [os.path.join(folder, name) for name in names]
            self.labels += [label] * len(names)
        self._epochs = Epochs(len(self.files), seed)

    def image(self, number: int) -> tuple[np.ndarray, int]:
        """Raises:
            ValueError: a file cannot be read; it is named.
        """
        index = self._epochs.place(number)
        image = self._read(self.files[index])
        random = np.random.default_rng([self.seed, number, 1])
        image = image.resize((self.size, self.size), self._pillow.Resampling.BICUBIC, _part(random, *image.size))
        if random.random() < 0.5:
            image = image.transpose(self._pillow.Transpose.FLIP_LEFT_RIGHT)
        if self._augment:
            image = self._augment(image, int(random.integers(2**32)))
        return np.array(image), self.labels[index]

    def _read(self, file: str) -> Image:
        """In RGB."""
        try:
            with self._pillow.open(file) as image:
                return image.convert("RGB")
        except (OSError, SyntaxError, ValueError, self._pillow.DecompressionBombError) as reason:
            said = "it is empty" if os.path.exists(file) and not os.path.getsize(file) else first_line(reason)
            raise ValueError(f"--data: {file} cannot be read as an image ({said}); replace it, or remove it and begin anew: "
                             "the order of the others depends on their number") from reason


def load_images(data: str, sizes: VisionSizes, seed: int) -> Images:
    """What --data names: "synthetic", of at most 100 classes, or a path as in `ImageFolder`.

    Raises:
        FileNotFoundError, ValueError, ImportError: naming what came and what is accepted.
    """
    if data == "synthetic":
        return Images(SyntheticImages(min(sizes.classes, LARGEST), sizes.image_size, seed), sizes.classes)
    source = ImageFolder(Path(data), sizes.classes, sizes.image_size, seed, sizes.augment)
    return Images(source, sizes.classes, sizes.augment)


def _class_folders(path: Path, most: int) -> list[Path]:
    if not path.is_dir():
        there = "which is no folder" if path.exists() else "where nothing is"
        raise FileNotFoundError(f"--data: got {str(path)!r}, {there}, expected synthetic, or a folder with a folder of images "
                                "for each class in it or in its folder train")
    root = path / "train" if (path / "train").is_dir() else path
    folders = sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not folders:
        raise ValueError(f"--data: {root} has no folder in it, expected one for each class")
    if len(folders) > most:
        raise ValueError(f"--data: {root} has {len(folders)} folders, expected at most {most}, the classes of the preset")
    return folders


def _part(random: np.random.Generator, width: int, height: int) -> tuple[int, int, int, int]:
    """Left, top, right and bottom."""
    area = width * height * random.uniform(*_AREA)
    ratio = math.exp(random.uniform(*map(math.log, _RATIO)))
    wide, high = (min(max(round(math.sqrt(t)), 1), most) for t, most in ((area * ratio, width), (area / ratio, height)))
    left, top = int(random.integers(width - wide + 1)), int(random.integers(height - high + 1))
    return left, top, left + wide, top + high
