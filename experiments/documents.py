"""Packed documents with states of their own, beside one sequence of as many tokens; and a sequence whose states are asked for.

The lengths of documents are drawn from an exponential distribution, bounded on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from ssd import ssd_chunk_scan

from . import record, timing
from .autotuned_configs import compile_together
from .inputs import DTYPES, make_inputs
from .shapes import Shape
from .table import render_lines, write_head
from .terminal import track

SHORTEST, LONGEST = 64, 4096  # tokens of a document
_CHUNK_SIZE = 128
_TOKEN_TENSORS = "x", "dt", "B", "C", "z"


def draw_lengths(tokens: int, mean: int, seed: int) -> list[int]:
    """Lengths of documents that fill so many tokens; the last one is what is left, or joins the one before it."""
    rng, lengths = torch.Generator().manual_seed(seed), []
    while (left := tokens - sum(lengths)) > 0:
        drawn = torch.empty(1).exponential_(1 / mean, generator=rng).item()
        lengths.append(min(left, LONGEST, max(SHORTEST, round(drawn))))
    if len(lengths) > 1 and lengths[-1] < SHORTEST:
        lengths[-2:] = [sum(lengths[-2:])]
    return lengths


@compile_together()
def run(variants: Sequence[str], shapes: Sequence[Shape], modes: Sequence[str], dtype: str, mean: int, every: Sequence[int],
        against: str | None, out: Path, console: Console, repeats: int = 20, warmup: int = 5, seed: int = 0) -> list[dict]:
    """Measures the tokens of each shape as one row; appends a row of results for each way, also to return them.

    mean: tokens of a document. every: intervals of the states that a forward is asked for. against: a peer that is run once a
    document, from its state to the next.
    """
    rows = []
    settings = [(shape, mode, variant) for shape in shapes for mode in modes for variant in variants]
    with timing.side_stream():
        for shape, mode, variant in track(settings, console, lambda one: f"{one[0].name} {one[1]} {one[2]}"):
            row = replace(shape, batch=1, seqlen=shape.batch * shape.seqlen)
            lengths = draw_lengths(row.seqlen, mean, seed)
            calls = _list_calls(row, mode, variant, DTYPES[dtype], lengths, every, against)
            for call in calls.values():
                call()
            measured = timing.measure(calls, repeats, warmup)
            alike = {"bench": "documents", "mode": mode, "shape": shape.name, **row.sizes, "dtype": dtype,
                     "chunk_size": _CHUNK_SIZE, "ndocs": len(lengths)}
            rows += record.add([{**alike, "variant": against if way == "alone" else variant, "way": way, **times}
                                for way, times in measured.items()], out)
    return rows


def _list_calls(shape: Shape, mode: str, variant: str, dtype: torch.dtype, lengths: list[int], every: Sequence[int],
                against: str | None) -> dict[str, Callable]:
    """{way: call}, of one variant."""
    given = make_inputs(shape, dtype, "cuda", requires_grad=True)
    ends = torch.tensor(lengths, device="cuda").cumsum(0)
    states = torch.randn(len(lengths), shape.nheads, shape.headdim, shape.dstate, device="cuda", requires_grad=True)
    documents = {"cu_seqlens": torch.cat((ends.new_zeros(1), ends)).int(), "initial_states": states,
                 "return_final_states": True}
    seq_idx = torch.repeat_interleave(torch.arange(len(lengths), device="cuda"), torch.tensor(lengths, device="cuda"))
    scan = partial(ssd_chunk_scan, **given, chunk_size=_CHUNK_SIZE, variant=variant)
    leaves = [t for t in given.values() if isinstance(t, Tensor)]
    dout, dstates = torch.randn_like(given["x"]), torch.randn_like(states)
    calls = {"one": timing.make_call(scan, mode, leaves, dout),
             "packed": timing.make_call(partial(scan, seq_idx=seq_idx.int()[None]), mode, leaves, dout),
             "states": timing.make_call(partial(scan, **documents), mode, [*leaves, states], (dout, dstates)),
             "copy": states.clone}
    if mode == "fwd":
        calls |= {f"every {n}": timing.make_call(partial(scan, return_states_every=n), mode, leaves, None) for n in every}
    if against:
        bounds = list(pairwise([0, *ends.tolist()]))
        douts = [t for n, (start, end) in enumerate(bounds) for t in (dout[:, start:end], dstates[n : n + 1])]
        calls["alone"] = timing.make_call(partial(_scan_alone, given, states, bounds, against), mode, [*leaves, states], douts)
    return calls


def _scan_alone(given: dict, states: Tensor, bounds: list[tuple[int, int]], variant: str) -> list[Tensor]:
    """Each document in a call of its own: outputs and final states."""
    shared = {name: t for name, t in given.items() if name not in _TOKEN_TENSORS}
    results = []
    for n, (start, end) in enumerate(bounds):
        cut = {name: given[name][:, start:end] for name in _TOKEN_TENSORS if name in given}
        results += ssd_chunk_scan(**cut, **shared, chunk_size=_CHUNK_SIZE, variant=variant, initial_states=states[n : n + 1],
                                  return_final_states=True)
    return results


_SAID = {"one": "one sequence, no states", "packed": "packed by `seq_idx`, no states", "states": "documents with states",
         "copy": "copy of those states", "alone": "each document in a call of its own"}


def tabulate(rows: list[dict]) -> str:
    """The last row of each way, in CUDA graphs, beside one sequence: of the same variant in the same run, or else the last."""
    lines, ones = [], [row for row in rows if row["way"] == "one"]
    latest = record.latest(rows, lambda row: tuple(row[key] for key in ("gpu", "shape", "ndocs", "mode", "variant", "way")))
    for row in sorted(latest, key=lambda row: (row["gpu"], row["ndocs"], row["mode"] == "bwd")):
        us = record.get_us(row)
        alike = [one for one in ones if all(one[key] == row[key] for key in ("gpu", "shape", "mode"))]
        base = next((one for one in alike if all(one[key] == row[key] for key in ("variant", "time"))), (alike or [None])[-1])
        relative = f"{us / record.get_us(base):.2f}" if base and row["way"] != "copy" else ""
        said = _SAID.get(row["way"], f"one sequence, its states {row['way']} tokens")
        lines.append((said, row["variant"], row["mode"], f"{row['seqlen']:,} in {row['ndocs']} documents",
                      row["gpu"].removeprefix("NVIDIA "), f"{us:,.0f}", relative))
    head = write_head("what | variant | mode | tokens | GPU | µs | times one sequence", "what", "variant", "mode", "tokens",
                      "GPU")
    return f"{head}{render_lines(lines)}" if lines else "No rows yet: no GPU has run the bench of this table.\n"
