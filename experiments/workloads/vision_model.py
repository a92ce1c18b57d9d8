"""MambaVision (arXiv:2407.08083): convolutions while an image is large, then windows of tokens, by scans and by attention."""

from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .vision_mixers import SSD, Branches, Mamba1

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's red, green and blue, from 0 to 1
_CONV_STAGES, _STAGES = 2, 4


@dataclass(frozen=True)
class VisionSizes:
    """Attributes:
        dim: channels of the first stage, each of which has twice as many as the one before, at half the resolution.
        in_dim: channels between the two convolutions of the stem.
        depths: blocks of each of the four stages.
        heads: of attention, in stages 3 and 4.
        drop_path: how often the last block's branches are dropped in training; the first's never, and evenly in between.
        layer_scale: what branches of stages 3 and 4 are multiplied by at the start; None: they are not.
        image_size: pixels of an image's side, a multiple of 32.
        windows: tokens of a window's side, in stages 3 and 4, whose sides are a sixteenth and a thirty-second of the image's.
        classes: of images.
        headdim: of SSD.
        augment: images of a data set are augmented as in the published training.
        mixer: "mamba1", or "ssd", which is another model; see `vision_mixers`.
    """

    dim: int
    in_dim: int
    depths: tuple[int, int, int, int]
    heads: tuple[int, int]
    drop_path: float
    layer_scale: float | None = None
    image_size: int = 224
    windows: tuple[int, int] = (14, 7)
    classes: int = 1000
    headdim: int = 64
    augment: bool = True
    mixer: str = "mamba1"

    def __post_init__(self):
        for window, resolution in zip(self.windows, (self.image_size // 16, self.image_size // 32), strict=True):
            if self.image_size % 32 or resolution % window:
                raise ValueError(f"windows: got {self.windows} with image_size = {self.image_size}, expected a multiple of 32, "
                                 "and divisors of a sixteenth and of a thirty-second of it")


class VisionModel(nn.Module):
    """Normalised images to the logits of their classes.

    At the start linear weights are truncated normal with deviation 0.02, but for the mixers' step and rates.

    Args:
        sizes: of the model.
        variant: of the mixer, see `mamba1.choose_scan` and `ssd.ssd_chunk_scan`.
        checkpoint_activations: the backward computes each block of stages 3 and 4 again. Those before have batch norms, which
            would count every batch twice.
    """

    def __init__(self, sizes: VisionSizes, variant: str = "auto", checkpoint_activations: bool = False):
        super().__init__()
        self.sizes = sizes
        for name, channels in (("mean", MEAN), ("deviation", DEVIATION)):
            self.register_buffer(name, torch.tensor(channels).view(3, 1, 1), persistent=False)
        self.stem = nn.Sequential(*_make_halving(3, sizes.in_dim), *_make_halving(sizes.in_dim, sizes.dim))
        self.stages = nn.Sequential()
        dropped = (sizes.drop_path * block / (sum(sizes.depths) - 1) for block in range(sum(sizes.depths)))
        for stage, depth in enumerate(sizes.depths):
            dim, rates = sizes.dim * 2**stage, list(islice(dropped, depth))
            if stage < _CONV_STAGES:
                self.stages.extend(_ConvBlock(dim, rate) for rate in rates)
            else:
                self.stages.append(_WindowStage(sizes, stage - _CONV_STAGES, dim, rates, variant, checkpoint_activations))
            if stage < _STAGES - 1:
                self.stages.append(nn.Conv2d(dim, 2 * dim, 3, stride=2, padding=1, bias=False))
        self.norm = nn.BatchNorm2d(dim)
        self.head = nn.Linear(dim, sizes.classes)
        self._initialise()

    @property
    def compiled_beside_layers(self) -> list[nn.Module]:
        """What torch.compile takes besides layers."""
        return [self.stem, *(stage for stage in self.stages if isinstance(stage, _ConvBlock))]

    def normalise(self, images: Tensor) -> Tensor:
        """(batch, 3, size, size) uint8 to fp32 with ImageNet's mean 0 and deviation 1."""
        return (images / 255 - self.mean) / self.deviation

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, size, size), normalised, to (batch, classes), in the dtype of the weights or of autocast."""
        if images.is_cuda:  # whose convolutions are fastest so, and keep it
            images = images.contiguous(memory_format=torch.channels_last)
        return self.head(self.norm(self.stages(self.stem(images))).mean((2, 3)))

    @torch.no_grad()
    def _initialise(self) -> None:
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and not name.endswith("dt_proj"):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)


def _make_halving(channels_in: int, channels_out: int) -> tuple[nn.Module, ...]:
    """A layer of the stem, which halves the resolution."""
    conv = nn.Conv2d(channels_in, channels_out, 3, stride=2, padding=1, bias=False)
    return conv, nn.BatchNorm2d(channels_out, eps=1e-4), nn.ReLU()


class _ConvBlock(nn.Module):
    """(batch, dim, height, width) to the same shape."""

    def __init__(self, dim: int, drop_path: float):
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(dim, dim, 3, padding=1), nn.BatchNorm2d(dim), nn.GELU("tanh"),
            nn.Conv2d(dim, dim, 3, padding=1), nn.BatchNorm2d(dim), DropPath(drop_path))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class _WindowStage(nn.Module):
    """(batch, dim, height, width) to the same shape.

    In the first half of the blocks, rounded up, a scan mixes the tokens of each window, in the others attention.
    """

    def __init__(self, sizes: VisionSizes, place: int, dim: int, rates: list[float], variant: str, again: bool):
        """place: 0 for stage 3, 1 for stage 4; rates: of `DropPath`, a block each; again: compute blocks in the backward."""
        super().__init__()
        self.window, self.again = sizes.windows[place], again
        self.blocks = nn.ModuleList()
        for block, rate in enumerate(rates):
            mixer = _scan(sizes, dim, variant) if 2 * block < len(rates) else _Attention(dim, sizes.heads[place])
            mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
            self.blocks.append(nn.Sequential(*(_Residual(dim, branch, rate, sizes.layer_scale) for branch in (mixer, mlp))))

    def forward(self, x: Tensor) -> Tensor:
        tokens = split_windows(x, self.window)
        for block in self.blocks:
            tokens = checkpoint(block, tokens, use_reentrant=False) if self.again and self.training else block(tokens)
        return join_windows(tokens, self.window, *x.shape[2:])


def _scan(sizes: VisionSizes, dim: int, variant: str) -> Branches:
    if sizes.mixer == "ssd":
        return Branches(dim, SSD(dim // 2, sizes.headdim, variant))
    return Branches(dim, Mamba1(dim // 2, -(-dim // 16), variant))


class _Residual(nn.Module):
    """x, and to it what `branch` makes of its norm; (windows, tokens, dim) to the same shape."""

    def __init__(self, dim: int, branch: nn.Module, drop_path: float, layer_scale: float | None):
        super().__init__()
        self.norm, self.branch, self.drop_path = nn.LayerNorm(dim), branch, DropPath(drop_path)
        self.scale = None if layer_scale is None else nn.Parameter(torch.full((dim,), layer_scale))

    def forward(self, x: Tensor) -> Tensor:
        y = self.branch(self.norm(x))
        return x + self.drop_path(y if self.scale is None else self.scale * y)


class _Attention(nn.Module):
    """Of every token of a window to every other; (windows, tokens, dim) to the same shape."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.in_proj, self.out_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.in_proj(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [windows, heads, tokens, _]
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class DropPath(nn.Module):
    """In training some rows are 0, drawn by torch's generator, and the others larger, so that the mean is the same.

    Args:
        rate: how often, from 0 up to but not 1.
    """

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """(rows, ...) to the same shape."""
        if not self.rate or not self.training:
            return x
        kept = x.new_empty(len(x), *[1] * (x.dim() - 1)).bernoulli_(1 - self.rate)
        return x * kept.div_(1 - self.rate)


def split_windows(x: Tensor, window: int) -> Tensor:
    """(batch, dim, height, width) to (batch * windows, window * window, dim); windows row by row, and their tokens too.

    Args:
        window: a divisor of height and width.
    """
    parts = x.unflatten(3, (-1, window)).unflatten(2, (-1, window))  # [b, d, rows, i, columns, j]
    return parts.permute(0, 2, 4, 3, 5, 1).flatten(3, 4).flatten(0, 2)


def join_windows(tokens: Tensor, window: int, height: int, width: int) -> Tensor:
    """What `split_windows` took apart, in channels_last."""
    parts = tokens.view(-1, height // window, width // window, window, window, tokens.shape[-1])  # [b, rows, columns, i, j, d]
    return parts.transpose(2, 3).reshape(-1, height, width, tokens.shape[-1]).permute(0, 3, 1, 2)
