"""The augmentation that MambaVision is trained with (the configs of NVlabs/MambaVision), through timm.

timm draws from Python's and numpy's global generators, which here are seeded for it and put back. Only what pixels it erases
with comes from torch's, which the runner seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..packages import import_package
from .vision_model import MEAN

if TYPE_CHECKING:
    from PIL.Image import Image

_POLICY = "rand-m9-mstd0.5-inc1"
_ERASED, _MIXUP, _CUTMIX = 0.25, 0.8, 1.0


def rand_augment(size: int) -> Callable[[Image, int], Image]:
    """What augments an image of that many pixels a side, as a seed draws it.

    Raises:
        ImportError: timm, or what it needs, is missing.
    """
    settings = {"translate_const": int(0.45 * size), "img_mean": tuple(round(255 * mean) for mean in MEAN)}
    transform = _timm().rand_augment_transform(_POLICY, settings)
    for operation in transform.ops:
        if operation.name == "PosterizeIncreasing":
            operation.magnitude_max = 9.9  # at 10 it keeps no bit of a colour, which Pillow 13 refuses

    def augment(image: Image, seed: int) -> Image:
        with _seed_generators(seed):
            return transform(image)

    return augment


def mix(images: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Images with a part of some erased, each then mixed with another's whole or a part, and the shares of classes in them.

    Args:
        images: (batch, 3, size, size), normalised; overwritten. batch is even.
        labels: (batch,), the classes.

    Returns:
        Images, and (batch, classes) fp32, whose rows sum to 1.

    Raises:
        ValueError: batch is odd.
    """
    if len(images) % 2:
        raise ValueError(f"--batch: got {len(images)}, expected an even number: augmentation mixes images in pairs")
    data = _timm()
    erase = data.random_erasing.RandomErasing(_ERASED, mode="pixel", device=images.device)
    mix = data.Mixup(_MIXUP, _CUTMIX, label_smoothing=0, num_classes=classes)
    with _seed_generators(int(torch.randint(2**32, ()))):
        return mix(erase(images), labels)


@contextmanager
def _seed_generators(seed: int) -> Iterator[None]:
    """seed: below 2**32."""
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _timm() -> ModuleType:
    return import_package("timm.data", "augments images", "pip install timm torchvision, or --data synthetic, or --preset tiny")
