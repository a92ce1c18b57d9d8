"""The scan that vLLM calls, under its name and with its signature: requests packed in one row, a state in and out of each.

For inference. Who calls `mamba_chunk_scan_combined_varlen` of vLLM may call this one in its place.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from ..api import check_flags, check_settings, check_tensors, ssd_chunk_scan, take_int
from ..block.arguments import check_apart, check_floating, check_form, check_not_negative, check_rows
from ..documents import check_bounds
from ..registry import resolve, run_rows
from ..types import Options, SSDInputs
from .functions import fit_chunk_size

_INTEGERS = (torch.int32, torch.int64)


@torch.no_grad()
def mamba_chunk_scan_combined_varlen(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    cu_seqlens: Tensor,
    cu_chunk_seqlens: Tensor,
    last_chunk_indices: Tensor,
    seq_idx: Tensor,
    out: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_intermediate_states: bool = False,
    state_dtype: torch.dtype | None = None,
    final_states_out: Tensor | None = None,
    final_state_indices: Tensor | None = None,
    variant: str = "auto",
) -> Tensor | None:
    """`ssd.ssd_chunk_scan` of requests with states, without an axis for the batch. `variant` is ours.

    Args:
        x, z, out: (seqlen, nheads, headdim); out is written.
        dt: (seqlen, nheads).
        B, C: (seqlen, ngroups, dstate).
        chunk_size: tokens of a chunk at most. With intermediate states a power of two from 16 to 256, else any: it does not
            change the result.
        cu_seqlens: (nrequests + 1,), boundaries of the requests.
        cu_chunk_seqlens: (nchunks + 1,), boundaries of the chunks, each of one request.
        last_chunk_indices: (nrequests,), the last chunk of each request. Like the chunks, it is read only where intermediate
            states are asked for.
        seq_idx: (nchunks,), the request of each chunk. Not read: the boundaries say it.
        initial_states: (nrequests, nheads, headdim, dstate), zeros unless given.
        return_intermediate_states: return the state after each chunk, not after each request.
        state_dtype: of what is returned; C's dtype unless given.
        final_states_out: (nslots, nheads, headdim, dstate), any strides but 0: the states after requests are written here, and
            not returned. Not with intermediate states.
        final_state_indices: (nrequests,), the slot of each, no two alike, with final_states_out. On a GPU nobody looks at
            them.

    Returns:
        (nrequests or nchunks, nheads, headdim, dstate); None with final_states_out.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is accepted.
    """
    for name, t in (("x", x), ("dt", dt), ("B", B), ("C", C), ("out", out), ("z", z)):
        axes = 2 if name == "dt" else 3
        if name != "z" or t is not None:
            if not isinstance(t, Tensor):
                raise TypeError(f"{name}: got {type(t).__name__}, expected a tensor of {axes} axes, seqlen the first")
            if t.dim() != axes:
                raise ValueError(f"{name}: got shape {tuple(t.shape)}, expected {axes} axes, seqlen the first")
    check_form("out", out, tuple(x.shape), x)
    check_apart("out", out)
    check_bounds(cu_seqlens, x[None], x.shape[0])
    check_flags({"return_intermediate_states": return_intermediate_states})
    if state_dtype is not None:
        check_floating("state_dtype", state_dtype)
    if final_states_out is not None or final_state_indices is not None:
        if return_intermediate_states:
            raise ValueError("final_states_out: got one with return_intermediate_states, expected one of the two")
        _check_slots(final_states_out, final_state_indices, (*x.shape[1:], B.shape[2]), cu_seqlens, x)
    x, dt, B, C, gate = x[None], dt[None], B[None], C[None], None if z is None else z[None]
    if return_intermediate_states:
        check_tensors(x, dt, A, B, C, D, gate, dt_bias, initial_states, variant, cu_seqlens)
        chunk_size = take_int("chunk_size", chunk_size)
        check_settings(chunk_size, {"dt_softplus": dt_softplus}, dt_limit, state_dtype, variant, None)
        _check_chunks(cu_chunk_seqlens, last_chunk_indices, cu_seqlens, chunk_size, x)
        inputs = SSDInputs(x, dt, A, B, C, chunk_size, D, gate, dt_bias, initial_states, None, cu_seqlens, dt_softplus,
                           tuple(dt_limit), torch.float32)
        y, states = _scan_chunks(inputs, cu_chunk_seqlens, last_chunk_indices, variant)
    else:
        y, states = ssd_chunk_scan(
            x, dt, A, B, C, fit_chunk_size(chunk_size), D=D, z=gate, dt_bias=dt_bias, initial_states=initial_states,
            cu_seqlens=cu_seqlens, dt_softplus=dt_softplus, dt_limit=dt_limit, return_final_states=True,
            state_dtype=torch.float32, variant=variant)
    out.copy_(y[0])
    if final_states_out is not None:
        final_states_out[final_state_indices.long()] = states.to(final_states_out.dtype)
        return None
    return states.to(state_dtype or C.dtype)


def _check_slots(slots, indices, state: tuple[int, ...], cu_seqlens, x) -> None:
    rows = slots.shape[:1] if isinstance(slots, Tensor) else ("nslots",)
    check_form("final_states_out", slots, (*rows, *state), x)
    check_form("final_state_indices", indices, (len(cu_seqlens) - 1,), x, _INTEGERS)
    check_rows("final_state_indices", indices, "final_states_out", slots.shape[0])
    check_not_negative("final_state_indices", indices)
    check_apart("final_states_out", slots)
    if indices.device.type == "cpu" and len({*(numbers := indices.tolist())}) < len(numbers):
        raise ValueError(f"final_state_indices: got {numbers}, expected a slot of its own for each request")


def _check_chunks(cu_chunk_seqlens, last_chunk_indices, cu_seqlens, chunk_size, x) -> None:
    check_bounds(cu_chunk_seqlens, x, x.shape[1], "cu_chunk_seqlens")
    check_form("last_chunk_indices", last_chunk_indices, (len(cu_seqlens) - 1,), x, _INTEGERS)
    if x.device.type != "cpu":
        return
    bounds, ends = cu_chunk_seqlens.tolist(), cu_seqlens.tolist()
    if any(end - start > chunk_size for start, end in pairwise(bounds)):
        raise ValueError(f"cu_chunk_seqlens: got {bounds}, expected chunks of at most chunk_size = {chunk_size} tokens")
    last = last_chunk_indices.tolist()
    if [bounds[chunk + 1] for chunk in last if -1 <= chunk < len(bounds) - 1] != ends[1:]:
        raise ValueError(f"last_chunk_indices: got {last}, expected the chunks of {bounds} that end at {ends[1:]}, where "
                         "requests do")


def _scan_chunks(i: SSDInputs, cu_chunk_seqlens: Tensor, last_chunks: Tensor, variant: str) -> tuple[Tensor, Tensor]:
    """out, and the state after each chunk."""
    options = Options()
    chosen = resolve(variant, i, options, "fwd")
    if not chosen.takes_documents:
        from ..baseline.document_rows import forward_chunks

        return forward_chunks(run_rows(chosen, i), i, cu_chunk_seqlens, last_chunks, options)
    first, outs, states = [0, *(last_chunks + 1).tolist()], [], []
    for chunk, (start, end) in enumerate(pairwise(cu_chunk_seqlens.tolist())):
        state = states[-1] if chunk not in first else None
        if chunk in first and i.initial_states is not None:
            request = len(first) - 1 - first[::-1].index(chunk)
            state = i.initial_states[request : request + 1]
        cut = {name: t[:, start:end] for name in ("x", "dt", "B", "C", "z") if (t := getattr(i, name)) is not None}
        out, state, _ = chosen.forward(replace(i, **cut, cu_seqlens=None, initial_states=state), options, False)
        outs.append(out)
        states.append(state)
    return torch.cat(outs, 1), torch.cat(states)
