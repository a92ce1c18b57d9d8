"""Time and memory of the components of a Mamba-1 and a Mamba-2 block over the sequence length, as in arXiv:2511.22849.

The blocks are those of mamba-1.4b and mamba2-1.3b. A component is set up alone, on tensors laid out as the block has them:
inference is its forward, training its forward and backward.
"""

from collections.abc import Callable
from itertools import product
from operator import itemgetter
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console

from ssd import ssd_chunk_scan
from ssd.block import causal_conv1d_fn

from .. import block, record, timing
from ..inputs import DTYPES, make_inputs
from ..shapes import Shape
from ..terminal import leave_out, track

MODES = {"fwd": "inference", "fwd_bwd": "training"}
CHUNK_SIZE = 256
_D_MODEL, _INNER, _HEADDIM, _DSTATE, _DT_RANK = 2048, 4096, 64, {"mamba1": 16, "mamba2": 128}, 128


def run(seqlens: tuple[int, ...], dtype: str, out: Path, console: Console, repeats: int = 20, warmup: int = 5) -> list[dict]:
    """Measures every component at every length and returns the rows, each appended to its file as soon as it is known."""
    rows: list[dict] = []
    settings = [(seqlen, *which) for seqlen, which in product(seqlens, COMPONENTS)]
    with timing.side_stream():
        for seqlen, name, component in track(settings, console, lambda one: f"{one[1]} {one[2]} {one[0]}"):
            shape = _make_shape(name, seqlen)
            row = {"bench": "scaling", "part": component, "shape": name, **shape.sizes, "dtype": dtype}
            with leave_out(console, f"{name} {component} {seqlen}"):
                work = COMPONENTS[name, component](shape, DTYPES[dtype])
                for mode in MODES:
                    (values,) = block.measure(work, {block.OURS: work.ours}, mode, repeats, warmup).values()
                    rows += record.add([row | {"mode": mode} | values], out)
    return rows


def read_latest(out: Path = record.RESULTS) -> list[dict]:
    """The last row of each component, length and mode, the shortest first."""
    rows = record.latest(record.read(out, bench="scaling"), itemgetter("gpu", "shape", "part", "seqlen", "mode", "dtype"))
    return sorted(rows, key=itemgetter("seqlen"))


def _make_shape(name: str, seqlen: int) -> Shape:
    headdim = _HEADDIM if name == "mamba2" else 1
    return Shape(name, 1, seqlen, _INNER // headdim, headdim, _DSTATE[name], 1)


def _make_linear(inputs: int, outputs: Callable[[Shape], int] | int) -> Callable[[Shape, torch.dtype], block.Work]:
    """A linear layer on every token."""

    def make(shape: Shape, dtype: torch.dtype) -> block.Work:
        x = block.draw_normal(shape.batch, shape.seqlen, inputs, dtype=dtype)
        weight = block.draw_normal(outputs if isinstance(outputs, int) else outputs(shape), inputs, dtype=dtype)
        return block.Work(lambda: F.linear(x, weight), None, (x, weight), {})

    return make


def _make_conv1d_of_x(shape: Shape, dtype: torch.dtype) -> block.Work:
    """Mamba-1 convolves x alone, a half of its projection, whose tokens lie side by side; B and C are made of it afterwards."""
    x = block.draw_normal(shape.batch, 2 * _INNER, shape.seqlen, dtype=dtype)[:, :_INNER].detach().requires_grad_()
    weight, bias = block.draw_normal(_INNER, block.WIDTH), block.draw_normal(_INNER)
    return block.Work(lambda: causal_conv1d_fn(x, weight, bias, activation="silu"), None, (x, weight, bias), {})


def _make_ssd(shape: Shape, dtype: torch.dtype) -> block.Work:
    inputs = make_inputs(shape, dtype, block.choose_device(), requires_grad=True)
    leaves = tuple(t for t in inputs.values() if isinstance(t, torch.Tensor))
    return block.Work(lambda: ssd_chunk_scan(**inputs, chunk_size=CHUNK_SIZE), None, leaves, {})


COMPONENTS: dict[tuple[str, str], Callable[[Shape, torch.dtype], block.Work]] = {
    ("mamba1", "in_proj"): _make_linear(_D_MODEL, 2 * _INNER),
    ("mamba1", "conv1d"): _make_conv1d_of_x,
    ("mamba1", "x_proj"): _make_linear(_INNER, _DT_RANK + 2 * _DSTATE["mamba1"]),
    ("mamba1", "dt_proj"): _make_linear(_DT_RANK, _INNER),
    ("mamba1", "ssm"): block.make_selective_scan,
    ("mamba1", "out_proj"): _make_linear(_INNER, _D_MODEL),
    ("mamba2", "in_proj"): _make_linear(_D_MODEL, lambda shape: 2 * _INNER + 2 * shape.dstate + shape.nheads),
    ("mamba2", "conv1d"): block.make_conv1d,
    ("mamba2", "ssm"): _make_ssd,
    ("mamba2", "norm"): block.make_gated_norm,
    ("mamba2", "out_proj"): _make_linear(_INNER, _D_MODEL),
}
