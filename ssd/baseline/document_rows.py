"""Documents with states of their own, for variants that know none: each document is cut into rows, which a variant takes as the
rows of a batch.

The state that each row starts from is found first, as (28) of docs/ssd.md finds that of a segment: `chunk_state` gives what
each row leaves from zeros, `document_passing` passes it on. Then the variant runs the rows. The backward goes from the other
end: `chunk_scan_dstates` and `document_passing` give the gradient of the state that each row ends with, then the variant runs
the rows. Rows are filled up with tokens that have a step of 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import reference_stages as stages
from ..documents import find_bounds
from ..kernels.arguments import fit_to_tiles
from ..kernels.chunk_cumsum import chunk_cumsum
from ..runtime.tuning import next_power_of_2
from ..types import SUB_CHUNK, Options, SSDGrads, SSDInputs, SSDSaved
from .kernels.chunk_scan_dstates import chunk_scan_dstates
from .kernels.chunk_scan_dz import chunk_scan_dz
from .kernels.chunk_state import chunk_state
from .kernels.document_passing import pass_states, pass_states_bwd


def forward(run: Callable, i: SSDInputs, options: Options, save: bool) -> tuple[Tensor, Tensor, SSDSaved]:
    """As `Variant.forward`, by `run`, that of a variant. It keeps no states."""
    out, y, final_states, _ = _run_rows(run, _Rows.of(i), i, options, save)
    return out, final_states, SSDSaved(i, options, y, out=out)


def forward_chunks(run: Callable, i: SSDInputs, cu_chunk_seqlens: Tensor, last_chunks: Tensor,
                   options: Options) -> tuple[Tensor, Tensor]:
    """out, and the state after each chunk, (nchunks, nheads, headdim, dstate) fp32, of a row cut into the caller's chunks.

    cu_chunk_seqlens: (nchunks + 1,), boundaries of the chunks, of at most chunk_size tokens, which are of one document each.
    last_chunks: (ndocs,), the last chunk of each document; that of an empty one is the last before it.
    """
    rows = _Rows.of_chunks(i, cu_chunk_seqlens, last_chunks)
    out, _, final_states, prev_states = _run_rows(run, rows, i, options, False)
    ends = rows.first[1:].long()
    chunks = torch.arange(prev_states.shape[0], device=ends.device)
    document = torch.searchsorted(ends, chunks, right=True)
    is_last = (chunks + 1 == ends[document])[:, None, None, None]
    return out, torch.where(is_last, final_states[document], prev_states.roll(-1, 0))


def _run_rows(run: Callable, rows: _Rows, i: SSDInputs, options: Options,
              save: bool) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """out and y of the tokens, final_states of the documents, and the states before the rows."""
    with torch.cuda.device_of(i.x):
        prev_states, final_states = _find_states(rows, i, *chunk_cumsum(rows.whole), options)
    given = replace(rows.whole, z=None if i.z is None else rows.pack(i.z), initial_states=prev_states)
    out, _, saved = run(given, replace(options, save_states=False), save)
    return rows.unpack(out), None if saved.y is None else rows.unpack(saved.y), final_states, prev_states


def backward(run: Callable, saved: SSDSaved, dout: Tensor, dfinal_states: Tensor | None, into: SSDGrads) -> SSDGrads:
    """As `Variant.backward`, by `run`, that of a variant."""
    i, options = saved.inputs, saved.options
    dout = fit_to_tiles(dout)
    with torch.cuda.device_of(i.x):
        dz, dy = (None, dout) if i.z is None else chunk_scan_dz(saved, dout, into.dz)
        rows = _Rows.of(i)
        dy = rows.pack(dy)
        dt, dA_cumsum = chunk_cumsum(rows.whole)
        prev_states, _ = _find_states(rows, i, dt, dA_cumsum, options)
        dprev_states = chunk_scan_dstates(rows.whole, dy, dA_cumsum, options)
        dstates, dinitial_states = pass_states_bwd(rows.whole, dfinal_states, dprev_states, dA_cumsum, rows.first)
    grads = run(SSDSaved(replace(rows.whole, initial_states=prev_states), options), dy, dstates, SSDGrads())
    ddt, ddt_bias = stages.step_bwd(rows.unpack(grads.ddt), *_get_step(i))
    found = {name: rows.unpack(getattr(grads, name)) for name in ("dx", "dB", "dC")} | {
        "ddt": ddt.to(i.dt.dtype).contiguous()}  # arithmetic keeps the strides of dt, which may be any
    if i.initial_states is not None:
        found["dinitial_states"] = dinitial_states
    placed = {name: grad if (place := getattr(into, name)) is None else place.copy_(grad) for name, grad in found.items()}
    return SSDGrads(**placed, dA=grads.dA, dD=grads.dD, dz=dz, ddt_bias=None if i.dt_bias is None else ddt_bias)


@dataclass(frozen=True)
class _Rows:
    """Where the tokens of documents are in rows.

    Attributes:
        whole: the rows as a batch, each a chunk, with the steps as `dt`, without z and states.
        slots: (seqlen,) the place of each token, counted through all rows.
        first: as `document_passing` takes it. There are as many rows as the documents of the worst lengths need.
    """

    whole: SSDInputs
    slots: Tensor
    first: Tensor

    @classmethod
    def of(cls, i: SSDInputs) -> _Rows:
        ndocs = i.cu_seqlens.shape[0] - 1
        # a chunk, or less where documents are shorter
        length = min(max(SUB_CHUNK, next_power_of_2(-(-i.seqlen // ndocs))), i.chunk_size)
        nrows = (i.seqlen + ndocs * (length - 1)) // length
        bounds = find_bounds(i.cu_seqlens, i.seqlen)
        first = torch.nn.functional.pad(((bounds.diff() + length - 1) // length).cumsum(0), (1, 0))
        tokens = torch.arange(i.seqlen, device=i.x.device)
        document = torch.searchsorted(bounds[1:], tokens, right=True)
        slots = first[document] * length + tokens - bounds[document]
        return cls._pack_inputs(i, slots, first, nrows, length)

    @classmethod
    def of_chunks(cls, i: SSDInputs, cu_chunk_seqlens: Tensor, last_chunks: Tensor) -> _Rows:
        """See `forward_chunks`."""
        tokens = torch.arange(i.seqlen, device=i.x.device)
        starts = cu_chunk_seqlens.long()
        chunk = torch.searchsorted(starts[1:].contiguous(), tokens, right=True)
        slots = chunk * i.chunk_size + tokens - starts[chunk]
        first = torch.nn.functional.pad(last_chunks.long() + 1, (1, 0))
        return cls._pack_inputs(i, slots, first, starts.shape[0] - 1, i.chunk_size)

    @classmethod
    def _pack_inputs(cls, i: SSDInputs, slots: Tensor, first: Tensor, nrows: int, length: int) -> _Rows:
        size = nrows, length
        packed = {"x": i.x, "B": i.B, "C": i.C, "dt": stages.step(*_get_step(i))}
        whole = replace(i, **{name: _pack(t, slots, *size) for name, t in packed.items()}, chunk_size=length, z=None,
                        dt_bias=None, initial_states=None, cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, float("inf")))
        return cls(whole, slots, torch.nn.functional.pad(first, (0, 1), value=nrows).int())

    @property
    def length(self) -> int:
        return self.whole.seqlen

    def pack(self, t: Tensor) -> Tensor:
        """(1, seqlen, ...) in rows, (nrows, length, ...), zero where there is no token."""
        return _pack(t, self.slots, self.whole.batch, self.length)

    def unpack(self, t: Tensor) -> Tensor:
        """The other way."""
        return t.flatten(0, 1).index_select(0, self.slots)[None]


def _pack(t: Tensor, slots: Tensor, nrows: int, length: int) -> Tensor:
    return t.new_zeros(nrows * length, *t.shape[2:]).index_copy_(0, slots, t[0]).unflatten(0, (nrows, length))


def _get_step(i: SSDInputs) -> tuple:
    """Arguments of `stages.step`, in fp32."""
    return i.dt.float(), None if i.dt_bias is None else i.dt_bias.float(), i.dt_softplus, i.dt_limit


def _find_states(rows: _Rows, i: SSDInputs, dt: Tensor, dA_cumsum: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """The state before each row, and after each document."""
    return pass_states(rows.whole, i.initial_states, chunk_state(rows.whole, dt, dA_cumsum, options), dA_cumsum, rows.first)
