"""The named problem sizes and what is run at them. Imports no torch, so that the command line can list and refuse names."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .known_names import suggest

if TYPE_CHECKING:
    from ssd.cost import Problem

MODES = ("fwd", "fwd_train", "bwd", "fwd_bwd")  # fwd_train: a forward that a backward will follow
DIRECTIONS = {"fwd": "forward", "bwd": "backward"}  # as documents write them
ITEMSIZES = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes of an element of a dtype
CHUNK_SIZES = (64, 128, 256)  # measured unless one is asked for


@dataclass(frozen=True)
class Shape:
    """Sizes of one call, without the chunk size, which each variant may choose. gated: whether the scan is given z."""

    name: str
    batch: int
    seqlen: int
    nheads: int
    headdim: int
    dstate: int
    ngroups: int
    gated: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("name", "gated")}

    def problem(self, chunk_size: int, dtype: str) -> Problem:
        """The same sizes for the cost model; dtype: one of `ITEMSIZES`."""
        from ssd.cost import Problem

        return Problem(**self.sizes, chunk_size=chunk_size, itemsize=ITEMSIZES[dtype], gated=self.gated)


def _read_shapes() -> dict[str, list[Shape]]:
    """The shapes of shapes.txt, by group."""
    found: dict[str, list[Shape]] = {}
    for line in Path(__file__).with_suffix(".txt").read_text().splitlines():
        if line and not line.startswith("#"):
            group, name, *sizes = line.split()
            found.setdefault(group, []).append(Shape(name, *map(int, sizes), gated=name == "gated"))
    return found


NAMED, WORKLOADS, SCANS, _SHORT = map(tuple, _read_shapes().values())
SEQLENS = tuple(2**n for n in range(6, 15))
_2_7B = next(shape for shape in NAMED if shape.name == "2.7b-b4")
SWEEP = tuple(replace(_2_7B, name=f"sweep-{seqlen}", batch=1, seqlen=seqlen) for seqlen in SEQLENS)
MODELS = (*_SHORT, *(replace(shape, name=f"{shape.name}-32k", batch=1, seqlen=32768) for shape in _SHORT))
BLOCK_PARTS = ("conv1d", "gated_norm", "state_update", "selective_scan", "block")  # that `block` measures; a scan at SCANS
PATCHED_MODELS = ("falcon-h1-7b", "nemotron-nano-9b-v2")  # models of transformers that `patches` measures layers of
DECODE_RIVALS = ("mamba_ssm", "transformers")  # libraries that `decode` knows

# Small enough for Triton's interpreter; ragged, with two heads to a group and more than one chunk.
SMALL = Shape("small", batch=1, seqlen=100, nheads=4, headdim=16, dstate=16, ngroups=2)

_GROUPS = {"named": NAMED, "workloads": WORKLOADS, "sweep": SWEEP, "models": MODELS}
SHAPES = {shape.name: shape for group in _GROUPS.values() for shape in group}


def is_gated(name: str) -> bool:
    """Whether the scan of the shape of that name is given z, which rows say by the name alone."""
    return name in SHAPES and SHAPES[name].gated


def find_shapes(names: str) -> list[Shape]:
    """Shapes of a comma-separated list of names, or of sizes as `BATCHxSEQLENxNHEADSxHEADDIMxDSTATExNGROUPS`; `named`,
    `workloads`, `sweep` and `models` stand for all of theirs.

    Raises:
        ValueError: an unknown name, with the known ones; sizes of 0, or heads that are no multiple of the groups.
    """
    found = {}
    for name in names.split(","):
        if name in _GROUPS:
            found |= {shape.name: shape for shape in _GROUPS[name]}
        elif name in SHAPES:
            found[name] = SHAPES[name]
        elif re.fullmatch(r"\d+(x\d+){5}", name):
            found[name] = shape = Shape(name, *map(int, name.split("x")))
            if 0 in shape.sizes.values() or shape.nheads % shape.ngroups:
                raise ValueError(f"shape: got {name!r}, expected positive sizes and nheads a multiple of ngroups, in the order "
                                 f"{' x '.join(shape.sizes)}")
        else:
            known, single = (*_GROUPS, *SHAPES), ", ".join(shape.name for shape in (*NAMED, *WORKLOADS))
            raise ValueError(f"shape: got {name!r}, expected {', '.join(_GROUPS)}, or one of theirs: {single}, sweep-<seqlen>, "
                             f"a model as {_SHORT[0].name}, or sizes of your own as BATCHxSEQLENxNHEADSxHEADDIMxDSTATExNGROUPS"
                             f"{suggest(name, known)}")
    return list(found.values())
