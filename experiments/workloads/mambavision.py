"""Workload `mambavision`: images sorted into classes, at the sizes of arXiv:2407.08083, which differ in the mixer alone.

Mixer `mamba1` is the published model, and its scan no SSD; mixer `ssd` is another model, into which the SSD variants swap.
"""

import torch.nn.functional as F
from torch import Tensor

from .augmentation import mix
from .images import SMOOTHING, load_images
from .registry import Preset, Workload
from .vision_model import VisionModel, VisionSizes


def mix_images(model: VisionModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with its images normalised and mixed, if its data set is augmented; batch: as `images.Images` has it."""
    if "augmented" not in batch:
        return batch
    images, labels = mix(model.normalise(batch["image"]), batch["label"], model.sizes.classes)
    return {"image": images, "label": labels}


def class_loss(model: VisionModel, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of the smoothed class in nats; batch: of `mix_images`."""
    images = batch["image"]
    pixels = images if images.is_floating_point() else model.normalise(images)
    return F.cross_entropy(model(pixels).float(), batch["label"], label_smoothing=SMOOTHING)


def _make_published(sizes: VisionSizes) -> Preset:
    """32 micro-batches make the batch of 4096 of the published training."""
    return Preset(sizes, batch=128, lr=5e-3, optimizer="lamb", weight_decay=0.05)


WORKLOAD = Workload(
    "mambavision",
    presets={
        "tiny": Preset(VisionSizes(16, 16, (1, 1, 2, 2), heads=(4, 8), drop_path=0.1, image_size=64, windows=(4, 2), classes=10,
                                   headdim=16, augment=False), batch=32, lr=2e-3, weight_decay=0.05),
        "T": _make_published(VisionSizes(80, 32, (1, 3, 8, 4), heads=(8, 16), drop_path=0.2, headdim=32)),
        "T2": _make_published(VisionSizes(80, 32, (1, 3, 11, 4), heads=(8, 16), drop_path=0.2, headdim=32)),
        "S": _make_published(VisionSizes(96, 64, (3, 3, 7, 5), heads=(8, 16), drop_path=0.2)),
        "B": _make_published(VisionSizes(128, 64, (3, 3, 10, 5), heads=(8, 16), drop_path=0.3, layer_scale=1e-5)),
        # 392 and 784 channels of SSD are no multiples of 64
        "L": _make_published(VisionSizes(196, 64, (3, 3, 10, 5), heads=(16, 32), drop_path=0.3, layer_scale=1e-5, headdim=56)),
    },
    build=VisionModel,
    dataset=lambda run: load_images(run.data, run.sizes, run.seed),
    loss=class_loss,
    prepare=mix_images,
    unit="images",
    mixers=("mamba1", "ssd"),
)
