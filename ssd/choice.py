"""What "auto" runs: the variant that was fastest in the nearest measured call, or a rule for GPUs that nobody has measured.

A table, `configs/variants/<gpu>.json`, has a line for each measured call, by mode and sizes, with the variants that were
compared there, the fastest first. `python -m experiments choose` writes it from rows.
"""

from __future__ import annotations

import json
import math
from dataclasses import astuple, dataclass
from functools import lru_cache

import torch

from .runtime import tuning
from .runtime.devices import is_hopper
from .runtime.toolchain import gluon_missing
from .types import HOPPER_DSTATES, HOPPER_HEADDIM, SSDInputs

CANDIDATES = ("persistent", "fused", "baseline")  # on a GPU; in the order of the rule for Hopper
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

    def comparable(self, other: Measured) -> bool:
        """Whether the two differ in nothing but how much there is to do."""
        return astuple(self)[:4] == astuple(other)[:4]

    def has_hopper_kernels(self) -> bool:
        """Whether there are kernels for Hopper of these sizes, which not all inputs of them can take."""
        return self.itemsize == 2 and self.headdim == HOPPER_HEADDIM and self.dstate in HOPPER_DSTATES

    def distance(self, other: Measured) -> float:
        """Doublings between the two: of sequences, of their length and of the chunk size, added up."""
        return sum(abs(math.log2(a / b)) for a, b in zip(astuple(self)[4:], astuple(other)[4:], strict=True))


def ranking(inputs: SSDInputs, mode: str) -> tuple[tuple[str, ...], str]:
    """The variants to try for "auto", best first, and why in this order."""
    x = inputs.x
    if x.device.type == "cpu":
        return ("torch",), "tensors are on the CPU"
    batch, seqlen, nheads, headdim = x.shape
    return _ranking(x.device.index, mode, x.dtype.itemsize, headdim, inputs.dstate, batch * nheads, seqlen, inputs.chunk_size)


@lru_cache(maxsize=1024)
def _ranking(index: int, *sizes) -> tuple[tuple[str, ...], str]:
    order, why = _order(index, Measured(*sizes))
    if is_hopper(torch.device("cuda", index)) and Measured(*sizes).has_hopper_kernels() and (missing := gluon_missing()):
        why = f"{why}; in plain Triton kernels, not those for Hopper: {missing}"
    return order, why


def _order(index: int, call: Measured) -> tuple[tuple[str, ...], str]:
    name = tuning.current_device(index).name
    measured = {m: order for m, order in _table(name).items() if m.comparable(call)}
    if not measured:
        hopper = is_hopper(torch.device("cuda", index))
        if call.mode == "bwd" and not (hopper and call.has_hopper_kernels()):
            return CANDIDATES[::-1], f"no backward of such sizes was measured on {name}; the baseline's is the one used longest"
        order = CANDIDATES if hopper else CANDIDATES[1:]
        return order, f"no such sizes were measured on {name}; {order[0]} leads on {'' if hopper else 'GPUs other than '}Hopper"
    nearest = min(measured, key=call.distance)
    order = measured[nearest]
    return (*order, *(c for c in CANDIDATES if c not in order)), f"fastest of {', '.join(order)} at {nearest.key()} on {name}"


@lru_cache
def _table(device: str) -> dict[Measured, tuple[str, ...]]:
    path = TABLES / f"{device}.json"
    lines = json.loads(path.read_text()) if path.exists() else {}
    return {Measured.of_key(key): tuple(order) for key, order in lines.items()}
