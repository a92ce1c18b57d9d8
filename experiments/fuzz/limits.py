"""How large a drawn configuration may be, and what it may ask for, by where it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from ssd.block import arguments

from . import modes


@dataclass(frozen=True)
class Limits:
    """Bounds of what is drawn.

    Attributes:
        elements: of an intermediate of the truth, an estimate.
        long: a seqlen that one configuration of a run has; 0: none.
    """

    dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32")
    channels: int = 256  # headdim and dstate
    nheads: int = 80
    seqlen: int = 5000
    batch: int = 6
    chunk_size: int = 256
    elements: int = 40_000_000
    long: int = 200_000
    modes: tuple[str, ...] = modes.MODES
    calls: int = 5

    @staticmethod
    def of(variant: str, device: str) -> Limits:
        """The limits of a variant on a device. On a CPU kernels are interpreted, a thousand times as slowly."""
        if device == "cuda":
            return Limits()
        if variant in ("torch", "auto"):
            return _ON_CPU
        return _INTERPRETED

    @staticmethod
    def of_block(device: str) -> Limits:
        """The limits of what surrounds the operator, which has no variants."""
        return Limits() if device == "cuda" else _INTERPRETED if arguments.INTERPRETED else _ON_CPU


_ON_CPU = replace(Limits(), elements=400_000, long=0, modes=modes.ON_CPU, nheads=12, seqlen=600)
_INTERPRETED = replace(_ON_CPU, dtypes=("fp32", "fp16"), channels=20, nheads=3, seqlen=40, batch=2, chunk_size=32, calls=2,
                       modes=("plain", "no_grad", "checkpoint"))


def draw_size(rng: Random, most: int, favoured: tuple[int, ...] = ()) -> int:
    """A size from 1 to most: one of those favoured in a third of draws, else small ones as often as large ones."""
    favoured = tuple(size for size in favoured if size <= most)
    if favoured and rng.random() < 1 / 3:
        return rng.choice(favoured)
    if rng.random() < 0.5:
        return rng.randint(1, most)
    return min(most, int(2 ** rng.uniform(0, most.bit_length())))


def draw_subset(rng: Random, names: tuple[str, ...]) -> tuple[str, ...]:
    """All of the names in half of draws, else each with even odds; one at least, if there are any."""
    if rng.random() < 0.5:
        return names
    return tuple(name for name in names if rng.random() < 0.5) or tuple(rng.sample(names, min(1, len(names))))


def draw_mode(rng: Random, limits: Limits) -> str:
    """Most often plain; torch.compile takes ten seconds, so seldom that."""
    weights = {"plain": 58, "capture": 10, "streams": 9, "no_grad": 9, "inference": 6, "checkpoint": 6, "compile": 1.6}
    return rng.choices(limits.modes, [weights[mode] for mode in limits.modes])[0]
