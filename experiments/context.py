"""Context parallelism: one sequence over several GPUs beside one GPU, and beside all-to-alls from tokens to heads.

Times are medians of GPU time, of the slowest rank, eager and in CUDA graphs, which hold the exchanges too. Before each call the
GPUs wait for each other, so that no rank's time is a wait for a host that came later. Every rank also runs the whole sequence
alone, in turn with the others' way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from operator import itemgetter
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from ssd import ssd_chunk_scan
from ssd.distributed.cost import count_all_to_alls, count_states
from ssd.distributed.peers import has_window
from ssd.modules import Mamba2

from . import record, timing
from .inputs import DTYPES, make_inputs
from .parallel import Team
from .shapes import SHAPES, Shape
from .table import render_lines, write_head
from .terminal import first_line

MODES = ("fwd", "fwd_bwd")
PARTS = ("scan", "block")
MIXER = replace(SHAPES["8b-b1"], name="8b")
CHUNK_SIZE = 256
_LONGEST_BLOCK = 65536  # tokens: a GPU holds the whole sequence's block and its part's
_EXPANDED = 2  # channels of a block inside, for each outside
TABLE_TOKENS, TABLE_RANKS = (65536, 1048576), (2, 8, 64, 512)


def run(parts: Sequence[str], seqlens: Sequence[int], modes: Sequence[str], variant: str, dtype: str, team: Team, out: Path,
        console: Console, repeats: int = 20, warmup: int = 5) -> list[dict]:
    """Measures the operator and whole blocks at the 8B mixer's sizes; the first rank appends rows.

    seqlens: tokens of the whole sequence, of which each rank has as many. A block has 65,536 at most.

    Raises:
        ValueError: fewer than two GPUs, tokens that they cannot have as many of, or nothing to time.
    """
    if team.size < 2 or team.device.type != "cuda":
        raise ValueError(f"context: got {team.size} process on {team.device.type}, expected one for each of two or more GPUs: "
                         "python -m torch.distributed.run --standalone --nproc-per-node 2 -m experiments context. Nothing was "
                         "timed")
    if uneven := [seqlen for seqlen in seqlens if seqlen % team.size]:
        raise ValueError(f"--seqlen: got {uneven[0]}, expected a multiple of {team.size}, the number of GPUs")
    settings = [(replace(MIXER, seqlen=seqlen), part, mode) for seqlen, part, mode in product(seqlens, parts, modes)
                if part == "scan" or seqlen <= _LONGEST_BLOCK]
    if not settings:
        raise ValueError(f"--seqlen: got {min(seqlens)} of a block, expected at most {_LONGEST_BLOCK}")
    rows, console = [], console if team.rank == 0 else Console(quiet=True)
    with timing.side_stream():
        for shape, part, mode in settings:
            calls = (_list_scans if part == "scan" else _list_blocks)(shape, mode, variant, DTYPES[dtype], team)
            rows.append(_measure(shape, part, mode, variant, dtype, calls, team, repeats, warmup))
            if team.rank == 0:
                record.append(rows[-1], out)
            console.print(_describe(rows[-1]), markup=False)
            del calls
            torch.cuda.empty_cache()
    return rows


def _measure(shape: Shape, part: str, mode: str, variant: str, dtype: str, calls: dict[str, Callable], team: Team, repeats: int,
             warmup: int) -> dict:
    dist.barrier()
    times = _time(calls, team, repeats, warmup)
    peak_mib = team.max_over(timing.measure_peak_mib(calls["parts"]))
    torch.cuda.empty_cache()  # graphs keep memory of their own
    captured, note = _capture(calls, team)
    graphs = _time(captured, team, repeats, warmup)
    slow = record.find_slow_clock()
    (p20, p50, p80), graph_p50 = times["parts"], graphs["parts"][1] if "parts" in graphs else None
    forward, backward = count_states(shape.problem(CHUNK_SIZE, dtype), team.size)
    alone, dealt, *in_graphs = (of[name][1] if name in of else None
                                for of in (times, graphs) for name in ("alone", "all_to_all"))
    efficiency = in_graphs[0] / graph_p50 / team.size if graph_p50 and in_graphs[0] else alone / p50 / team.size
    return {
        "bench": "context", "part": part, "mode": mode, "shape": shape.name, **shape.sizes, "dtype": dtype, "variant": variant,
        "chunk_size": CHUNK_SIZE, "ranks": team.size, "p20_us": p20, "p50_us": p50, "p80_us": p80, "alone_p50_us": alone,
        "graph_p50_us": graph_p50, "alone_graph_p50_us": in_graphs[0], "all_to_all_graph_p50_us": in_graphs[1],
        "efficiency": efficiency, "all_to_all_p50_us": dealt,
        "bytes_received": forward.bytes + (backward.bytes if mode == "fwd_bwd" else 0),
        "copied": has_window(dist.group.WORLD), "peak_mib": peak_mib,
        "link_gbps": team.measure_link(), "note": note, **slow, **record.environment()}


def _time(calls: dict[str, Callable], team: Team, repeats: int, warmup: int) -> dict[str, list[float]]:
    """20th, 50th and 80th percentile of each, of the slowest rank."""
    token = torch.zeros(1, device=team.device)
    times = timing.interleave(calls, repeats, warmup, partial(dist.all_reduce, token))
    return {name: [team.max_over(value) for value in values] for name, values in times.items()}


def _capture(calls: dict[str, Callable], team: Team) -> tuple[dict[str, Callable], str | None]:
    """Those that every rank could capture: what one rank replays, others must. And why this rank could not capture others."""
    graphs, notes = {}, []
    for name, call in calls.items():
        try:
            graph, failed = timing.capture(call), 0
        except Exception as reason:  # memory, for one
            failed = 1
            notes.append(f"no CUDA graph of {name}: {first_line(reason)}")
            torch.cuda.synchronize()
        if not team.max_over(failed):
            graphs[name] = graph
    return graphs, "; ".join(notes) or None


def _list_scans(shape: Shape, mode: str, variant: str, dtype: torch.dtype, team: Team) -> dict[str, Callable]:
    """{way: call}. All-to-alls: without the copies that put tokens and heads in their order, and not the convolution's."""
    scan = partial(ssd_chunk_scan, chunk_size=CHUNK_SIZE, variant=variant)
    ranks = team.size

    def make(shape: Shape, group: dist.ProcessGroup | None = None) -> Callable:
        inputs = make_inputs(shape, dtype, str(team.device), requires_grad=True)
        leaves = [t for t in inputs.values() if isinstance(t, Tensor)]
        return timing.make_call(partial(scan, **inputs, context_group=group), mode, leaves, torch.randn_like(inputs["x"]))

    calls = {"parts": make(replace(shape, seqlen=shape.seqlen // ranks), dist.group.WORLD), "alone": make(shape)}
    if shape.nheads % ranks or shape.ngroups % ranks:
        return calls
    dealt = make(replace(shape, nheads=shape.nheads // ranks, ngroups=shape.ngroups // ranks))
    inner, group = shape.nheads * shape.headdim, shape.ngroups * shape.dstate
    sent = [torch.randn(ranks, shape.batch * shape.seqlen // ranks, channels // ranks, device=team.device, dtype=dtype)
            for channels in (2 * inner + 2 * group + shape.nheads, inner)]
    received = [torch.empty_like(t) for t in sent]

    def deal() -> None:
        for _ in range(1 if mode == "fwd" else 2):  # the gradients, the other way
            for given, got in zip(sent, received, strict=True):
                dist.all_to_all_single(got, given)
        dealt()

    return calls | {"all_to_all": deal}


def _list_blocks(shape: Shape, mode: str, variant: str, dtype: torch.dtype, team: Team) -> dict[str, Callable]:
    d_model = shape.nheads * shape.headdim // _EXPANDED

    def make(seqlen: int, group: dist.ProcessGroup | None) -> Callable:
        block = Mamba2(d_model, d_state=shape.dstate, headdim=shape.headdim, ngroups=shape.ngroups, chunk_size=CHUNK_SIZE,
                       expand=_EXPANDED, variant=variant, device=team.device, dtype=dtype, context_group=group)
        u = torch.randn(shape.batch, seqlen, d_model, device=team.device, dtype=dtype, requires_grad=True)
        return timing.make_call(partial(block, u), mode, [u, *block.parameters()], torch.randn_like(u))

    return {"parts": make(shape.seqlen // team.size, dist.group.WORLD), "alone": make(shape.seqlen, None)}


def _describe(row: dict) -> str:
    kind = "graph_" if row["graph_p50_us"] else ""
    faster, dealt = row["efficiency"] * row["ranks"], row[f"all_to_all_{kind}p50_us"]
    beside = "" if dealt is None else f", {dealt:.0f} us by all-to-alls"
    return (f"{row['part']} {row['mode']}, {row['seqlen']} tokens on {row['ranks']} GPUs: {row[f'{kind}p50_us']:.0f} us"
            f"{' in a CUDA graph' if kind else ''}, {faster:.2f}x of one GPU{beside}; "
            f"{row['bytes_received'] / 1e6:.1f} MB received, {'copied' if row['copied'] else 'by collectives'}")


def keep_latest(rows: list[dict]) -> list[dict]:
    """The last row of each part, mode and length, by GPU, ranks and variant."""
    return record.latest(rows, itemgetter("gpu", "ranks", "part", "mode", "seqlen", "variant"))


def tabulate_times(rows: list[dict]) -> str:
    """Of the last rows; of CUDA graphs, where there are such times."""
    lines = []
    for row in sorted(keep_latest(rows), key=lambda row: (row["gpu"], row["ranks"], row["part"], row["seqlen"], row["mode"])):
        kind = "graph_" if row.get("graph_p50_us") else ""
        times = (row[f"{kind}p50_us"], row[f"alone_{kind}p50_us"], row[f"all_to_all_{kind}p50_us"])
        sent = "copies" if row.get("copied") else "NCCL"  # rows without it are older
        lines.append((row["part"], row["mode"], f"{row['ranks']} x {row['gpu'].removeprefix('NVIDIA ')}", f"{row['seqlen']:,}",
                      "graph" if kind else "eager", sent, *("" if us is None else f"{us:,.0f}" for us in times),
                      f"{row['efficiency'] * row['ranks']:.2f}", row["git_sha"][:7]))
    columns = ("what", "mode", "GPUs", "tokens", "timed", "states by", "parts, µs", "one GPU, µs", "all-to-alls, µs",
               "times one GPU's speed", "commit")
    head = write_head(" | ".join(columns), "what", "mode", "GPUs", "timed", "states by", "commit")
    return f"{head}{render_lines(lines)}" if lines else "No rows yet: no two GPUs have run the bench of this table.\n"


def tabulate_exchanges() -> str:
    """What a rank receives in a layer, by `ssd.distributed.cost`."""
    rows = []
    for tokens in TABLE_TOKENS:
        problem = replace(MIXER, seqlen=tokens).problem(CHUNK_SIZE, "bf16")
        for ranks in TABLE_RANKS:
            forward, backward = count_states(problem, ranks)
            dealt = f"{count_all_to_alls(problem, ranks).bytes / 1e6:,.1f}" if problem.nheads % ranks == 0 else ""
            rows.append((f"{tokens:,}", ranks, f"{forward.bytes / 1e6:,.1f}", f"{backward.bytes / 1e6:,.1f}", dealt))
    head = write_head("tokens | ranks | states, forward | states, backward | all-to-alls, forward or backward")
    return (f"MB that a rank receives in one mixer of {MIXER.nheads} heads of {MIXER.headdim} channels, dstate "
            f"{MIXER.dstate}, {MIXER.ngroups} groups, batch 1, bf16.\nThese are computed and extrapolated: no GPU sent them. "
            f"Each number is the sum of two messages.\n\n{head}{render_lines(rows)}")
