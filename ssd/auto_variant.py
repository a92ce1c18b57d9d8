"""What "auto" runs: the variant that was fastest in the nearest measured call. On a GPU that nobody has measured, each variant
says what place it expects to have.

A table, `configs/variants/<gpu>.json`, has a line for each measured call, by mode and sizes, with the variants that were
compared there, the fastest first. `python -m experiments choose` writes it from rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from .runtime import tuning
from .runtime.devices import is_hopper
from .types import SSDInputs

if TYPE_CHECKING:
    from .registry import Variant

TABLES = tuning.CONFIGS / "variants"


@dataclass(frozen=True)
class Measured:
    """Where variants were compared: what a line of the table is about. mode: "fwd" or "bwd"."""

    mode: str
    itemsize: int
    headdim: int
    dstate: int
    sequences: int  # batch * nheads
    seqlen: int
    chunk_size: int

    def key(self) -> str:
        return "/".join(map(str, (self.mode, f"{self.itemsize}B", *astuple(self)[2:])))

    @staticmethod
    def of_key(key: str) -> Measured:
        mode, itemsize, *sizes = key.split("/")
        return Measured(mode, int(itemsize.removesuffix("B")), *map(int, sizes))

    def is_comparable(self, other: Measured) -> bool:
        """Whether the two differ in nothing but how much there is to do."""
        return astuple(self)[:4] == astuple(other)[:4]

    def measure_distance(self, other: Measured) -> float:
        """Doublings between the two: of sequences, of their length and of the chunk size, added up."""
        return sum(abs(math.log2(a / b)) for a, b in zip(astuple(self)[4:], astuple(other)[4:], strict=True))


def rank_variants(inputs: SSDInputs, mode: str, names: tuple[str, ...],
                  get_variant: Callable[[str], Variant]) -> tuple[tuple[str, ...], str]:
    """The variants to try for "auto", best first, and why in this order.

    names: those that may be chosen on a GPU; of two that are expected to be equal, the first goes first.
    """
    x = inputs.x
    if x.device.type == "cpu":
        return ("torch",), "tensors are on the CPU"
    batch, seqlen, nheads, headdim = x.shape
    return _rank(names, get_variant, x.device.index, mode, x.dtype.itemsize, headdim, inputs.dstate, batch * nheads, seqlen,
                 inputs.chunk_size)


@lru_cache(maxsize=1024)
def _rank(names: tuple[str, ...], get_variant: Callable[[str], Variant], index: int, *sizes) -> tuple[tuple[str, ...], str]:
    call, gpu = Measured(*sizes), tuning.current_device(index).name
    measured = {m: order for m, order in _table(gpu).items() if m.is_comparable(call)}
    if measured:
        nearest = min(measured, key=call.measure_distance)
        order = measured[nearest]
        return (*order, *(n for n in names if n not in order)), f"fastest of {', '.join(order)} at {nearest.key()} on {gpu}"
    hopper = is_hopper(torch.device("cuda", index))
    places = {name: get_variant(name).rank(call, hopper) for name in names}
    order = tuple(sorted((name for name in names if places[name] is not None), key=places.get, reverse=True))
    what = "backward" if call.mode == "bwd" else "forward"
    return order, f"no {what} of such sizes was measured on {gpu}; {order[0]} is expected to be the fastest there"


@lru_cache
def _table(device: str) -> dict[Measured, tuple[str, ...]]:
    path = TABLES / f"{device}.json"
    lines = json.loads(path.read_text()) if path.exists() else {}
    return {Measured.of_key(key): tuple(order) for key, order in lines.items()}
