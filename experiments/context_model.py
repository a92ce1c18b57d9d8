"""How long the operator takes on many GPUs that share a sequence: a model fitted to rows of two GPUs, and what it says of more.

    t = a + b tokens / ranks + c + bytes / link

a and b are of one GPU, fitted to its times in the same rows, by least squares of relative errors. So is c, what cutting a
sequence in two adds, the pass for the state that leaves among it. `ssd.distributed.cost` counts the bytes that a rank receives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from statistics import median

import numpy as np

from ssd.distributed.cost import count_all_to_alls, count_states

from . import record
from .context import CHUNK_SIZE, MIXER, MODES, TABLE_RANKS, TABLE_TOKENS, keep_latest
from .table import render_lines, write_head

_OF_ONE_HOST = 8  # GPUs; more are reached through a network
_NETWORK_GBPS = 50.0  # a GPU: one adapter of 400 Gb/s for each, as in a DGX H100 (its data sheet)
_FEWEST = 3  # lengths to fit to


@dataclass(frozen=True)
class Model:
    """a, b and c of a mode, in microseconds; the link in GB/s, as measured."""

    mode: str
    start: float
    token: float
    cut: float
    link_gbps: float

    def alone(self, seqlen: int) -> float:
        """Microseconds on one GPU."""
        return self.start + self.token * seqlen

    def parts(self, seqlen: int, ranks: int) -> float:
        """Microseconds on as many GPUs by states, the slowest rank's."""
        forward, backward = count_states(_make_problem(seqlen), ranks)
        received = forward.bytes + (backward.bytes if self.mode == "fwd_bwd" else 0)
        return self.alone(seqlen / ranks) + self.cut + received / self._find_link(ranks) / 1e3

    def all_to_alls(self, seqlen: int, ranks: int) -> float | None:
        """Microseconds on as many GPUs by all-to-alls, each with all tokens of its heads; None if they do not divide heads."""
        problem = _make_problem(seqlen)
        if problem.nheads % ranks:
            return None
        received = count_all_to_alls(problem, ranks).bytes * (2 if self.mode == "fwd_bwd" else 1)
        return self.alone(seqlen / ranks) + received / self._find_link(ranks) / 1e3

    def _find_link(self, ranks: int) -> float:
        return self.link_gbps if ranks <= _OF_ONE_HOST else _NETWORK_GBPS


def fit(rows: list[dict]) -> dict[str, Model]:
    """{mode: model}, of the GPU with the most lengths of the operator in CUDA graphs, if there are enough."""
    latest = keep_latest([row for row in rows if row["part"] == "scan" and row.get("graph_p50_us") and row["link_gbps"]])
    groups = record.group_by(latest, lambda row: (row["mode"], row["gpu"], row["ranks"], row["variant"])).items()
    most = {mode: max((group for key, group in groups if key[0] == mode), key=len, default=[]) for mode in MODES}
    return {mode: _fit(mode, group) for mode, group in most.items() if len(group) >= _FEWEST}


def _fit(mode: str, rows: list[dict]) -> Model:
    alone = np.array([row["alone_graph_p50_us"] for row in rows])
    tokens = np.array([row["seqlen"] for row in rows], float)
    (start, token), *_ = np.linalg.lstsq(np.stack([1 / alone, tokens / alone], 1), np.ones(len(rows)), rcond=None)
    if start < 0:  # few tokens would take less than no time
        start, token = 0, (tokens / alone).sum() / ((tokens / alone) ** 2).sum()
    uncut = Model(mode, float(start), float(token), 0.0, median(row["link_gbps"] for row in rows))
    parts = np.array([row["graph_p50_us"] for row in rows])
    added = parts - [uncut.parts(row["seqlen"], row["ranks"]) for row in rows]
    return replace(uncut, cut=float((added / parts**2).sum() / (1 / parts**2).sum()))


def tabulate(rows: list[dict]) -> str:
    """What the model says of two GPUs to 512."""
    models = fit(rows)
    if models.keys() != set(MODES):
        return "No rows yet: no two GPUs have run the bench at three lengths.\n"
    lines = []
    for seqlen, ranks in product(TABLE_TOKENS, TABLE_RANKS):
        cells = []
        for model in models.values():
            parts, dealt = model.parts(seqlen, ranks), model.all_to_alls(seqlen, ranks)
            cells += [f"{parts:,.0f}", f"{model.alone(seqlen) / parts:.2f}", "" if dealt is None else f"{dealt:,.0f}"]
        lines.append((f"{seqlen:,}", ranks, *cells))
    of = "parts, µs | times one GPU's speed | all-to-alls, µs"
    head = write_head(f"tokens | ranks | forward: {of} | forward and backward: {of}")
    said = [(f"{model.start:,.0f} and " if model.start >= 0.5 else "")
            + f"{1e3 * model.token:,.1f} for each thousand tokens, and {model.cut:,.0f} for the cut"
            for model in models.values()]
    link = (f"The link: {models['fwd'].link_gbps:,.0f} GB/s as measured, and beyond {_OF_ONE_HOST} GPUs {_NETWORK_GBPS:.0f}, "
            "which is assumed.")
    return (f"µs of one GPU, forward: {said[0]}; forward and backward: {said[1]}.\n{link}\n\n"
            f"{head}{render_lines(lines)}")


def _make_problem(seqlen: int):
    return replace(MIXER, seqlen=seqlen).problem(CHUNK_SIZE, "bf16")
