"""What each kernel is tested against: its stages of `ssd.reference_stages`, on the very tensors that the kernel is given.

`Values.draw` makes the tensors that pass between stages, in the dtypes that kernels store. `assert_stages` holds a kernel's
results to tests/errors.py's rule, as a whole and for every head alone: a fault in one head of many hardly shows in the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ssd import reference
from ssd import reference_stages as stages
from ssd.reference_stages import Masks, Precision, into_chunks
from ssd.types import SSDInputs
from tests.errors import error, largest_exponent, rounding
from tests.inputs import EVERYTHING, HALF, PLAIN, Shape, random_inputs, random_like

# ragged in every axis; two groups of three heads, which two programs share; a last chunk that is not full
SHAPE = Shape(2, 76, 6, 24, 2, 20, 32)
CASES = {"plain": replace(PLAIN, D="h"), "every option": EVERYTHING, "one document": replace(EVERYTHING, documents=None)}
# What each stage gives. What it takes has the names of its parameters.
RESULTS = {
    "chunk_cumsum": "dt dA_cumsum",
    "chunk_state": "states",
    "state_passing": "prev_states final_states",
    "bmm_chunk": "CB",
    "chunk_scan": "y",
    "chunk_scan_dz": "dz dy",
    "chunk_scan_dstates": "dprev_states",
    "state_passing_bwd": "dstates dinitial_states s",
    "chunk_scan_chunk_state_dx": "dx u_v_x q dD",
    "chunk_state_dB": "dB",
    "chunk_scan_dC": "dC r",
    "chunk_scan_dCB": "dCB",
    "bmm_bwd": "dB_pairs dC_pairs",
    "sum_pairs": "row col",
    "ddA_cumsum": "row_minus_col",
    "chunk_cumsum_bwd": "ddt dA ddt_bias",
}
_AXES = dict.fromkeys(("dA", "dD", "ddt_bias"), 0) | dict.fromkeys(  # of heads or groups; of all others the third
    ("dt", "dA_cumsum", "final_states", "dinitial_states", "s", "u_v_x", "q", "r", "row_minus_col", "net", "sum",
     "output", "col", "dy_x", "varlen_states"), 1)
_NEEDS = {"dinitial_states": "initial_states", "ddt_bias": "dt_bias"}  # results that are None without it

over_values = pytest.mark.parametrize(("case", "dtype"), [
    (case, dtype) for case in ("plain", "every option") for dtype in (torch.float32, HALF)], ids=str)


@dataclass(frozen=True)
class Values:
    """A call's inputs, and what passes between its stages as kernels store it."""

    inputs: SSDInputs
    dt: Tensor  # (batch, nheads, nchunks, chunk_size) fp32, as is dA_cumsum
    dA_cumsum: Tensor
    CB: Tensor  # fp32
    prev_states: Tensor  # in the dtype of x, as are dstates and dCB
    dstates: Tensor
    dCB: Tensor
    dy: Tensor  # (batch, seqlen, nheads, headdim) in the dtype of x
    dfinal_states: Tensor  # fp32, as are states and dprev_states
    states: Tensor
    dprev_states: Tensor

    @classmethod
    def draw(cls, case: str, dtype: torch.dtype, device: str, shape: Shape = SHAPE) -> Values:
        """prev_states are those of the call; other states, gradients of states and of CB are noise."""
        i = replace(random_inputs(shape, CASES[case], dtype, device), state_dtype=dtype)
        at = compute(i, {}, Precision(torch.float32), "chunk_cumsum", "chunk_state", "state_passing", "bmm_chunk")
        dy = (random_like(i.x, "dy") + i.x / 2).to(dtype)  # with x in it, so that no head's sum of dy . x nearly cancels
        dstates, states, dprev_states = (random_like(at.prev_states, name) for name in ("dstates", "states", "dprev_states"))
        return cls(i, at.dt.contiguous(), at.dA_cumsum.contiguous(), at.CB.contiguous(), at.prev_states.to(dtype).contiguous(),
                   dstates.to(dtype), random_like(at.CB, "dCB").to(dtype), dy.contiguous(),
                   random_like(at.final_states, "dfinal_states"), states, dprev_states)


def compute(i: SSDInputs, given: dict[str, Tensor], precision: Precision, *steps: str | Callable) -> SimpleNamespace:
    """Everything by name, tokens in chunks, after these steps: names of stages, and functions of what there is by then."""
    wide = reference.as_dtype(i, precision.compute)
    masks = Masks.of(i.seq_idx, i.batch, i.seqlen, i.chunk_size, precision.compute, i.x.device)
    at = SimpleNamespace(**vars(wide), ngroups=i.ngroups, dt_raw=wide.dt, masks=masks, precision=precision)
    at.D = wide.D if wide.D is None or wide.D.dim() == 2 else wide.D[:, None]
    vars(at).update((name, precision(t)) for name, t in given.items())
    vars(at).update((name, into_chunks(t, i.chunk_size)) for name, t in vars(at).items() if name in ("x", "B", "C", "dy"))
    for step in steps:
        if isinstance(step, str):
            stage = getattr(stages, step)
            found = stage(*(getattr(at, name) for name in signature(stage).parameters))
            vars(at).update(name_results(RESULTS[step], *(found if isinstance(found, tuple) else (found,))))
        else:
            step(at)
    return at


def name_results(names: str, *results: Tensor | None) -> dict[str, Tensor | None]:
    return dict(zip(names.split(), results, strict=True))


def as_stored(name: str, at: SimpleNamespace, i: SSDInputs) -> Tensor:
    """A stage's result in the form in which kernels leave it."""
    if name == "out":
        y = as_stored("y", at, i)
        return y if i.z is None else y * torch.nn.functional.silu(at.z)
    t = getattr(at, name)
    if name in ("y", "dx", "dB", "dC"):
        return t.flatten(1, 2)[:, : i.seqlen]
    if name == "CB":
        return torch.where(find_written_pairs(i), t, 0)
    return t.sum(-1) if name == "dD" and i.D.dim() == 1 else t


def find_written_pairs(i: SSDInputs) -> Tensor:
    """(1, nchunks, 1, i, j): the elements of CB and dCB that are read, j <= i < rows of the chunk."""
    token = torch.arange(i.nchunks * i.chunk_size, device=i.x.device).view(-1, i.chunk_size)
    below = torch.ones(i.chunk_size, i.chunk_size, dtype=torch.bool, device=i.x.device).tril()
    return (below & (token < i.seqlen)[:, :, None])[None, :, None]


def assert_stages(values: Values, got: dict[str, Tensor | None], *steps: str | Callable, **given: Tensor) -> None:
    """got: a kernel's results by name; steps: as for `compute`; given: what the kernel was given beside `values`."""
    i = values.inputs
    operand = None if i.x.dtype == torch.float32 else i.x.dtype
    given = {name: t for name, t in (vars(values) | given).items() if name != "inputs"}
    truths, mirrors = (compute(i, given, precision, *steps)
                       for precision in (Precision(torch.float64), Precision(torch.float32, operand)))
    decay = largest_exponent(i) * torch.finfo(torch.float32).eps
    faults = []
    for name, value in got.items():
        if not i.keeps_y(True) if name == "y" else name in _NEEDS and getattr(i, _NEEDS[name]) is None:
            assert value is None, name
            continue
        truth, mirror = as_stored(name, truths, i), as_stored(name, mirrors, i).to(value.dtype)
        assert value.shape == truth.shape, f"{name}: shape {tuple(value.shape)}, expected {tuple(truth.shape)}"
        whole, axis = (value, truth, mirror), _AXES.get(name, 2)
        heads = {f"{name}, head or group {h}": [t.select(axis, h) for t in whole] for h in range(value.shape[axis])}
        for where, (v, t, m) in ({name: whole} | heads).items():
            off, allowed, one = error(v, t), error(m, t), rounding(v.dtype)
            if operand is not None and v.dtype == torch.float32:
                one = max(one, rounding(operand))  # an operand that rounds the other way in one of the two
            if name in ("dA", "dD", "ddt_bias"):  # few numbers, where luck can leave the mirror's error near zero
                one = max(one, rounding(torch.float32, i.batch * i.seqlen))
            for kind, share in (("rms", 4), ("max", 2)):
                bound = 2 * getattr(allowed, kind) + getattr(one, kind) + decay / share
                if not getattr(off, kind) <= bound:  # so that NaN is a fault
                    faults.append(f"{where}: {kind} error {getattr(off, kind):.3g}, bound {bound:.3g}")
    assert not faults, "\n".join(faults)
