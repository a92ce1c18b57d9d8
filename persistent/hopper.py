"""The persistent forward on Hopper: chunk_cumsum, the state pass where sequences are cut, and the scan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache

import torch
import triton
from torch import Tensor

from ssd.kernels.chunk_cumsum import chunk_cumsum
from ssd.tuning import current_device
from ssd.types import Options, SSDInputs, SSDSaved

from .runs import RUN_FIELDS, Run, deal

_BLOCK_M, _HEADDIM, _DSTATES = 64, 64, (64, 128)
_ALIGNMENT = 16  # bytes, of what a TMA descriptor describes


def cannot_run(i: SSDInputs, options: Options, save: bool) -> str | None:
    """Why the plain kernels must run these inputs; None if these can. All bounds are those of the kernels' tiles."""
    if not _is_hopper(i.x.device):
        return f"needs a GPU of compute capability 9 and Triton 3.6, got {i.x.device}"
    if i.x.dtype not in (torch.bfloat16, torch.float16) or not i.x.dtype == i.B.dtype == i.C.dtype:
        return f"x, B, C: got dtypes {i.x.dtype}, {i.B.dtype}, {i.C.dtype}, takes bf16 or fp16, all alike"
    if i.headdim != _HEADDIM or i.dstate not in _DSTATES:
        return f"got headdim = {i.headdim}, dstate = {i.dstate}, takes headdim {_HEADDIM} and dstate of {_DSTATES}"
    if i.nheads // i.ngroups % 2:
        return f"got {i.nheads // i.ngroups} heads a group, takes even numbers"
    if i.z is not None or i.seq_idx is not None or (i.D is not None and i.D.dim() == 2):
        return "z, seq_idx, cu_seqlens and D of two dimensions are not in it"
    if save and options.save_states and i.chunk_size % _BLOCK_M:
        return f"chunk_size: got {i.chunk_size}, keeps states every {_BLOCK_M} tokens or a multiple"
    if not (options.exp2 and options.fuse_bmm and options.stationary):
        return "options.exp2, fuse_bmm and stationary cannot be off in it"
    for name, t in (("x", i.x), ("B", i.B), ("C", i.C)):
        if not _describable(t):
            return f"{name}: got strides {t.stride()}, takes contiguous heads and channels, and rows on 16 bytes"
    return None


def forward(inputs: SSDInputs, options: Options, save: bool) -> tuple[Tensor, Tensor, SSDSaved]:
    """As `persistent.forward.forward`, of inputs that `cannot_run` has no reason against."""
    from .kernels.hopper_scan import hopper_scan
    from .kernels.hopper_states import hopper_states

    i = inputs
    with torch.cuda.device_of(i.x):
        dt, dA_cumsum = chunk_cumsum(replace(i, chunk_size=_BLOCK_M))
        out = torch.empty(i.x.shape, device=i.x.device, dtype=i.x.dtype)
        x_desc, B_desc, C_desc, out_desc = (_describe(t) for t in (i.x, i.B, i.C, out))
        scan_runs, state_runs, npieces = _runs(i.batch, i.nheads // 2, dt.shape[2], options.segments, i.x.device)
        ends = factors = prev_states = None
        if npieces:
            ends, factors = hopper_states(i, x_desc, B_desc, dt, dA_cumsum, npieces, state_runs)
        if save and options.save_states:
            dtype = i.states_dtype if options.low_precision_states else i.state_dtype or torch.float32
            prev_states = torch.empty(i.batch, i.nchunks, i.nheads, i.headdim, i.dstate, device=i.x.device, dtype=dtype)
        final_states = hopper_scan(i, x_desc, B_desc, C_desc, out, out_desc, dt, dA_cumsum, ends, factors, prev_states,
                                   scan_runs)
    return out, final_states, SSDSaved(inputs, options, None, None, prev_states)


@cache
def _is_hopper(device: torch.device) -> bool:
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9 and version >= (3, 6)


def _describable(t: Tensor) -> bool:
    rows = [stride * t.element_size() % _ALIGNMENT for stride in t.stride()[:2]]
    return t.stride(3) == 1 and t.stride(2) == t.shape[3] and not any(rows) and t.data_ptr() % _ALIGNMENT == 0


def _describe(t: Tensor):
    """TMA descriptor of a tensor (batch, seqlen, heads, channels) in tiles of one head's rows of a sub-chunk."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    batch, seqlen, heads, channels = t.shape
    shape, strides = [batch, seqlen, heads * channels], [t.stride(0), t.stride(1), 1]
    return TensorDescriptor(t, shape, strides, [1, _BLOCK_M, channels], _layout(channels, t.dtype))


@cache
def _layout(channels: int, dtype: torch.dtype):
    from triton.experimental.gluon import language as gl

    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[dtype]
    return gl.NVMMASharedLayout.get_default_for([1, _BLOCK_M, channels], element)


@lru_cache(maxsize=256)
def _runs(batch: int, pairs: int, nsub: int, cut: bool, device: torch.device) -> tuple[Tensor, Tensor | None, int]:
    """Runs of the scan and of the state pass, (blocks, nruns, 6) int32 on the device, and the number of pieces."""
    runs = deal(batch, pairs, nsub, current_device(device.index).sms, cut)
    return _table(runs.scan, device), _table(runs.states, device) if runs.npieces else None, runs.npieces


def _table(blocks: tuple[tuple[Run, ...], ...], device: torch.device) -> Tensor:
    longest = max(map(len, blocks))
    empty = (0,) * RUN_FIELDS
    return torch.tensor([[*runs, *[empty] * (longest - len(runs))] for runs in blocks], dtype=torch.int32, device=device)
