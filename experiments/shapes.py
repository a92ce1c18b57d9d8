"""The named problem sizes and what is run at them. Imports no torch, so that the command line can list and refuse names."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from .names import suggest

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


_8B = Shape("8b-b1", batch=1, seqlen=4096, nheads=128, headdim=64, dstate=128, ngroups=8)
_2_7B = Shape("2.7b-b4", batch=4, seqlen=4096, nheads=80, headdim=64, dstate=128, ngroups=1)

# The sizes of Waleffe et al.'s 8B hybrid (arXiv:2406.07887), whole and a quarter of it, and of mamba2-2.7b and -130m.
NAMED = (
    _8B,
    replace(_8B, name="8b-b4", batch=4),
    replace(_8B, name="8b-b8", batch=8),
    replace(_8B, name="8b-tp4", batch=4, nheads=32, ngroups=2),
    _2_7B,
    replace(_2_7B, name="2.7b-64k", batch=1, seqlen=65536),
    replace(_2_7B, name="130m-b8", batch=8, seqlen=2048, nheads=24),
)
# The calls of `mambavision` T (many short rows) and `graphmamba` peptides-func (128 graphs in one row).
_VISION = Shape("vision-196", batch=128, seqlen=196, nheads=5, headdim=32, dstate=16, ngroups=1)
WORKLOADS = (
    _VISION,
    replace(_VISION, name="vision-49", seqlen=49, nheads=10),
    replace(_VISION, name="graphs", batch=1, seqlen=128 * 151, nheads=6),
)
SEQLENS = tuple(2**n for n in range(6, 15))
SWEEP = tuple(replace(_2_7B, name=f"sweep-{seqlen}", batch=1, seqlen=seqlen) for seqlen in SEQLENS)

# Parts of a block that `block` measures. The selective scan has shapes of its own, with channels as heads of one:
# MambaVision-T at 224 pixels, two GraphMambas (MalNet-Tiny's graphs have 1410 nodes on average), mamba-1.4b at two batches.
BLOCK_PARTS = ("conv1d", "gated_norm", "state_update", "selective_scan", "block")
SCANS = (
    Shape("mambavision-t-196", batch=128, seqlen=196, nheads=160, headdim=1, dstate=8, ngroups=1),
    Shape("mambavision-t-49", batch=128, seqlen=49, nheads=320, headdim=1, dstate=8, ngroups=1),
    Shape("graphmamba-peptides", batch=128, seqlen=151, nheads=96, headdim=1, dstate=16, ngroups=1),
    Shape("graphmamba-malnet", batch=16, seqlen=1410, nheads=128, headdim=1, dstate=16, ngroups=1),
    Shape("mamba-1.4b-b1", batch=1, seqlen=8192, nheads=4096, headdim=1, dstate=16, ngroups=1),
    Shape("mamba-1.4b", batch=8, seqlen=2048, nheads=4096, headdim=1, dstate=16, ngroups=1),
)

# Layers of published models, from their configs: nheads, headdim, dstate, ngroups. Codestral Mamba 7B is as Nemotron-H 8B,
# Nemotron Nano 12B v2 as the 9B, Granite 4 H small as Bamba 9B. The last three are of no published model: heads that are odd in
# number, a group for each head, and a gate inside the scan.
_LAYERS = {
    "mamba2-130m": (24, 64, 128, 1), "mamba2-370m": (32, 64, 128, 1), "mamba2-780m": (48, 64, 128, 1),
    "mamba2-1.3b": (64, 64, 128, 1), "mamba2-2.7b": (80, 64, 128, 1),
    "nemotron-h-4b": (112, 64, 128, 8), "nemotron-h-8b": (128, 64, 128, 8), "nemotron-h-56b": (256, 64, 256, 8),
    "nemotron-nano-9b-v2": (128, 80, 128, 8), "nemotron-3-nano-4b": (96, 80, 128, 8), "nemotron-3-nano-30b": (64, 64, 128, 8),
    "bamba-9b": (128, 64, 128, 1), "granite-4-h-tiny": (48, 64, 128, 1),
    "falcon-h1-tiny-90m": (24, 32, 64, 1), "falcon-h1-0.5b": (24, 64, 128, 1), "falcon-h1-1.5b": (48, 64, 256, 1),
    "falcon-h1-3b": (32, 128, 256, 1), "falcon-h1-7b": (24, 128, 256, 1), "falcon-h1-34b": (32, 128, 256, 2),
    "zamba2-2.7b": (80, 64, 64, 1), "zamba2-7b": (112, 64, 64, 2),
    "odd-heads": (25, 64, 128, 1), "group-per-head": (32, 64, 128, 32), "gated": (128, 64, 128, 8),
}
_SHORT = tuple(Shape(name, 2, 4096, *layer, gated=name == "gated") for name, layer in _LAYERS.items())
MODELS = (*_SHORT, *(replace(shape, name=f"{shape.name}-32k", batch=1, seqlen=32768) for shape in _SHORT))

# Small enough for Triton's interpreter; ragged, with two heads to a group and more than one chunk.
SMALL = Shape("small", batch=1, seqlen=100, nheads=4, headdim=16, dstate=16, ngroups=2)

_GROUPS = {"named": NAMED, "workloads": WORKLOADS, "sweep": SWEEP, "models": MODELS}
SHAPES = {shape.name: shape for group in _GROUPS.values() for shape in group}


def find_shapes(names: str) -> list[Shape]:
    """Shapes of a comma-separated list of names; `named`, `workloads`, `sweep` and `models` stand for all of theirs.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    found = {}
    for name in names.split(","):
        if name in _GROUPS:
            found |= {shape.name: shape for shape in _GROUPS[name]}
        elif name in SHAPES:
            found[name] = SHAPES[name]
        else:
            known, single = (*_GROUPS, *SHAPES), ", ".join(shape.name for shape in (*NAMED, *WORKLOADS))
            raise ValueError(f"shape: got {name!r}, expected {', '.join(_GROUPS)}, or one of theirs: {single}, sweep-<seqlen>, "
                             f"or a model as {_SHORT[0].name}{suggest(name, known)}")
    return list(found.values())
