"""The named problem sizes, what is run at them, and inputs such as a Mamba-2 layer feeds to the operator."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ssd.cost import Problem

MODES = ("fwd", "fwd_train", "bwd", "fwd_bwd")  # fwd_train: a forward that a backward will follow
DIRECTIONS = {"fwd": "forward", "bwd": "backward"}  # as they are written out
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Shape:
    """Sizes of one call, without the chunk size, which each variant may choose."""

    name: str
    batch: int
    seqlen: int
    nheads: int
    headdim: int
    dstate: int
    ngroups: int

    @property
    def sizes(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"}

    def problem(self, chunk_size: int, dtype: torch.dtype) -> Problem:
        """The same sizes for the cost model."""
        return Problem(**self.sizes, chunk_size=chunk_size, itemsize=dtype.itemsize)


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
# What `mambavision` T and `graphmamba` peptides-func ask of the operator: many short rows, and one of 128 graphs.
_VISION = Shape("vision-196", batch=128, seqlen=196, nheads=5, headdim=32, dstate=16, ngroups=1)
WORKLOADS = (
    _VISION,
    replace(_VISION, name="vision-49", seqlen=49, nheads=10),
    replace(_VISION, name="graphs", batch=1, seqlen=128 * 151, nheads=6),
)
SWEEP = tuple(replace(_2_7B, name=f"sweep-{2**n}", batch=1, seqlen=2**n) for n in range(6, 15))

# Small enough for Triton's interpreter; ragged, with two heads to a group and more than one chunk.
SMALL = Shape("small", batch=1, seqlen=100, nheads=4, headdim=16, dstate=16, ngroups=2)

_GROUPS = {"named": NAMED, "workloads": WORKLOADS, "sweep": SWEEP}
SHAPES = {shape.name: shape for shape in (*NAMED, *WORKLOADS, *SWEEP)}


def find_shapes(names: str) -> list[Shape]:
    """Shapes of a comma-separated list of names; `named`, `workloads` and `sweep` stand for all of theirs.

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
            raise ValueError(f"shape: got {name!r}, expected one of {', '.join((*_GROUPS, *SHAPES))}")
    return list(found.values())


def make_inputs(
    shape: Shape, dtype: torch.dtype, device: str, seed: int = 0, requires_grad: bool = False
) -> dict[str, Tensor | bool]:
    """Keyword arguments of `ssd_chunk_scan` but its chunk size, distributed as at a Mamba-2 layer's initialisation.

    x, B, C ~ N(0, 1) and dt ~ N(0, 1/4), contiguous and of `dtype`; in fp32 A ~ -U(1, 16), D = 1 and dt_bias such that
    the step softplus(dt_bias) is log-uniform in [0.001, 0.1].
    """
    rng = torch.Generator(device).manual_seed(seed)
    b, l, h, p, n, g = shape.sizes.values()

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=rng, device=device)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(h, generator=rng, device=device)

    step = uniform(math.log(0.001), math.log(0.1)).exp()
    tensors = {
        "x": normal(b, l, h, p).to(dtype),
        "dt": (0.5 * normal(b, l, h)).to(dtype),
        "A": -uniform(1, 16),
        "B": normal(b, l, g, n).to(dtype),
        "C": normal(b, l, g, n).to(dtype),
        "D": torch.ones(h, device=device),
        "dt_bias": step + torch.log(-torch.expm1(-step)),  # the inverse of softplus
    }
    return {name: t.requires_grad_(requires_grad) for name, t in tensors.items()} | {"dt_softplus": True}
