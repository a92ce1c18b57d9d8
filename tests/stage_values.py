"""What each kernel is tested against: its stage of `ssd.reference_stages`, on the very tensors that the kernel is given.

`Values.draw` makes the tensors that pass between stages, in the dtypes that kernels store. `assert_stage` holds a kernel's
result to tests/errors.py's rule, as a whole and for every head alone: a fault in one head of many hardly shows in the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import Tensor

from ssd import reference
from ssd import reference_stages as stages
from ssd.reference_stages import Masks, Precision, into_chunks
from ssd.types import SSDInputs
from tests.errors import error, largest_exponent, rounding
from tests.inputs import EVERYTHING, PLAIN, Case, Shape, random_inputs, random_like

# ragged in every axis; two groups of three heads, which two programs share; a last chunk that is not full
SHAPE = Shape(2, 76, 6, 24, 2, 20, 32)
CASES = {"plain": replace(PLAIN, D="h"), "every option": EVERYTHING}


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
    dfinal_states: Tensor  # fp32

    @classmethod
    def draw(cls, case: Case, dtype: torch.dtype, device: str, shape: Shape = SHAPE) -> Values:
        """States are those of the call; gradients of states and of CB are noise."""
        i = random_inputs(shape, case, dtype, device)
        i, precision = replace(i, state_dtype=dtype), Precision(torch.float32)
        wide = reference.as_dtype(i, torch.float32)
        dt, dA_cumsum = stages.chunk_cumsum(wide.dt, wide.A, i.chunk_size, wide.dt_bias, i.dt_softplus, i.dt_limit)
        dt, dA_cumsum = dt.contiguous(), dA_cumsum.contiguous()
        masks = Masks.of(i.seq_idx, i.batch, i.seqlen, i.chunk_size, torch.float32, device)
        x, B, C = (into_chunks(t, i.chunk_size) for t in (wide.x, wide.B, wide.C))
        states = stages.chunk_state(x, B, dt, dA_cumsum, masks, precision)
        prev_states, final_states = stages.state_passing(states, dA_cumsum, wide.initial_states, masks)
        CB = stages.bmm_chunk(C, B).contiguous()
        dy = (random_like(i.x, "dy") + i.x / 2).to(dtype)  # with x in it, so that no head's sum of dy . x nearly cancels
        return cls(i, dt, dA_cumsum, CB, prev_states.to(dtype).contiguous(), random_like(prev_states, "dstates").to(dtype),
                   random_like(CB, "dCB").to(dtype), dy.contiguous(), random_like(final_states, "dfinal_states"))

    def at(self, precision: Precision) -> SimpleNamespace:
        """All of it in the compute dtype, tokens cut into chunks, with masks and D as the stages take them."""
        i, Q = reference.as_dtype(self.inputs, precision.compute), self.inputs.chunk_size
        between = {name: precision(t) for name, t in vars(self).items() if isinstance(t, Tensor)}
        tokens = {name: into_chunks(t, Q) for name, t in (("x", i.x), ("B", i.B), ("C", i.C), ("dy", between.pop("dy")))}
        masks = Masks.of(i.seq_idx, i.batch, i.seqlen, Q, precision.compute, i.x.device)
        D = i.D if i.D is None or i.D.dim() == 2 else i.D[:, None]
        return SimpleNamespace(inputs=i, masks=masks, precision=precision, D=D, **between, **tokens)


def join_chunks(t: Tensor, seqlen: int) -> Tensor:
    """(batch, nchunks, chunk_size, ...) -> (batch, seqlen, ...)."""
    return t.flatten(1, 2)[:, :seqlen]


def written_pairs(i: SSDInputs) -> Tensor:
    """(1, nchunks, 1, i, j): the elements of CB and dCB that are read, j <= i < rows of the chunk."""
    token = torch.arange(i.nchunks * i.chunk_size, device=i.x.device).view(-1, i.chunk_size)
    below = torch.ones(i.chunk_size, i.chunk_size, dtype=torch.bool, device=i.x.device).tril()
    return (below & (token < i.seqlen)[:, :, None])[None, :, None]


def assert_stage(values: Values, got: dict[str, Tensor], stage, axes: dict[str, int]) -> None:
    """got: a kernel's results by name; stage: of `Values.at(...)`, the same by name; axes: where each result has its heads, or
    groups.
    """
    operand = None if values.inputs.x.dtype == torch.float32 else values.inputs.x.dtype
    truths = stage(values.at(Precision(torch.float64)))
    mirrors = stage(values.at(Precision(torch.float32, operand)))
    decay = largest_exponent(values.inputs) * torch.finfo(torch.float32).eps
    assert got.keys() == truths.keys() == mirrors.keys() == axes.keys()
    faults = []
    for name, value in got.items():
        truth, mirror = truths[name], mirrors[name].to(value.dtype)
        assert value.shape == truth.shape, f"{name}: shape {tuple(value.shape)}, expected {tuple(truth.shape)}"
        whole = [(f"{name}", value, truth, mirror)]
        heads = zip(value.unbind(axes[name]), truth.unbind(axes[name]), mirror.unbind(axes[name]), strict=True)
        for where, v, t, m in (*whole, *((f"{name}, head or group {n}", *of) for n, of in enumerate(heads))):
            off, allowed, one = error(v, t), error(m, t), rounding(v.dtype)
            if operand is not None and v.dtype == torch.float32:
                one = max(one, rounding(operand))  # an operand that rounds the other way in one of the two
            if name in ("dA", "dD", "ddt_bias"):  # few numbers, where luck can leave the mirror's error near zero
                one = max(one, rounding(torch.float32, values.inputs.batch * values.inputs.seqlen))
            for kind, share in (("rms", 4), ("max", 2)):
                bound = 2 * getattr(allowed, kind) + getattr(one, kind) + decay / share
                if not getattr(off, kind) <= bound:  # so that NaN is a fault
                    faults.append(f"{where}: {kind} error {getattr(off, kind):.3g}, bound {bound:.3g}")
    assert not faults, "\n".join(faults)
