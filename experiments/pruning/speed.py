"""Time and memory against ratio and sequence length: what is left of a block, of a model and of a training step when pruned.

Which states are removed does not change time, so they are drawn at random, from models that were not trained. Blocks are those
of mamba-1.4b and mamba2-1.3b, set up alone; model and step are a workload's.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from ssd import pruning
from ssd.modules import Mamba2, Mamba2LM

from .. import record, step_graph, timing
from ..block import choose_device
from ..decode import make_config
from ..inputs import DTYPES
from ..parallel import make_single
from ..step_time import Candidate, measure_steps
from ..terminal import leave_out, track
from ..training_run import Run
from ..workloads import get_workload
from ..workloads.language_model import MAMBA, LanguageSizes
from .mamba1_block import Mamba1

MODES = {"mamba1": ("fwd", "fwd_bwd", "decode"), "mamba2": ("fwd", "fwd_bwd", "decode"), "model": ("fwd", "decode"),
         "step": ("step",)}  # of each part
D_MODEL = 2048  # of the blocks
# of a row: what rows of several ratios share
identify_call = itemgetter("gpu", "part", "workload", "preset", "mode", "kind", "variant", "dtype", "batch", "seqlen")


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        run: of model and step; its dtype, batch and variant are the blocks' as well.
        kind, ratios: see `losses.Plan`.
        parts: of MODES.
        seqlens: tokens of a sample; a decoded token is one, whatever they are.
        repeats, warmup: timed calls of each, and calls before.
        out: of the rows.
    """

    run: Run
    kind: str
    ratios: tuple[float, ...]
    parts: tuple[str, ...]
    seqlens: tuple[int, ...]
    repeats: int = 20
    warmup: int = 5
    out: Path = record.RESULTS


def run(plan: Plan, console: Console) -> list[dict]:
    """Measures and returns the rows, each appended as soon as it is known. Ratio 0 is the whole, which others compare with.

    A ratio that a part's sizes do not allow is left out of it, and said.
    """
    rows: list[dict] = []
    for part in plan.parts:
        modes = [(mode, seqlen) for mode in MODES[part] for seqlen in (plan.seqlens if mode != "decode" else (1,))]
        for mode, seqlen in track(modes, console, lambda one, part=part: f"{part} {one[0]} {one[1]}"):
            with leave_out(console, f"{part} {mode} {seqlen}"):
                measure = _measure_steps if part == "step" else _measure_calls
                rows += record.add(_compare(plan, part, mode, seqlen, measure(plan, part, mode, seqlen, console)), plan.out)
    return rows


def read_latest(out: Path | list[dict] = record.RESULTS) -> list[dict]:
    """The last row of each part, ratio, length and mode."""
    return record.latest(record.read(out, bench="prune_speed"), lambda row: (identify_call(row), row["ratio"]))


def _compare(plan: Plan, part: str, mode: str, seqlen: int, measured: dict[float, dict]) -> Iterator[dict]:
    """Rows of one part, mode and length. speedup and graph_speedup are of the whole's time over the pruned one's, if it ran."""
    whole = measured.get(0.0)
    of_model = part in ("model", "step")
    for ratio, values in measured.items():
        yield {"bench": "prune_speed", "part": part, "workload": plan.run.workload if of_model else None,
               "preset": plan.run.preset if of_model else None, "variant": plan.run.variant, "mode": mode, "kind": plan.kind,
               "ratio": ratio, "batch": plan.run.batch, "seqlen": seqlen, "dtype": plan.run.dtype, **values,
               **(_compare_with(whole, values) if ratio and whole else {})}


def _compare_with(whole: dict, values: dict) -> dict:
    times = (side.get(key) for side in (values, whole) for key in ("p50_us", "graph_p50_us"))
    return {"against": "whole", **timing.compare_times(*times)}


def _measure_calls(plan: Plan, part: str, mode: str, seqlen: int, console: Console) -> dict[float, dict]:
    """The measured keys of each ratio's row, timed side by side. peak_mib is beyond weights, of weights_mib, and inputs."""
    whole = _build(plan, part)
    models = {0.0: whole}
    for ratio in plan.ratios:
        with leave_out(console, f"{part} without {ratio} of its {plan.kind}", ValueError):
            models[ratio] = _prune(copy.deepcopy(whole), plan, ratio)
    with timing.side_stream():
        calls = {ratio: _make_call(model, part, mode, plan.run.batch, seqlen) for ratio, model in models.items()}
        for call in calls.values():
            call()  # compiles and tunes
        measured = timing.measure(calls, plan.repeats, plan.warmup)
    return {ratio: values | _describe(models[ratio], plan.kind) for ratio, values in measured.items()}


def _prune(model: nn.Module, plan: Plan, ratio: float) -> nn.Module:
    pruning.prune(model, pruning.score_random(model, plan.kind, plan.run.seed), plan.kind, ratio)
    return model


def _build(plan: Plan, part: str) -> nn.Module:
    made = {"device": choose_device(), "dtype": DTYPES[plan.run.dtype]}
    if part == "mamba1":
        return Mamba1(D_MODEL, **made)
    if part == "mamba2":
        return Mamba2(D_MODEL, variant=plan.run.variant, **made)
    sizes = plan.run.sizes
    if not isinstance(sizes, LanguageSizes) or {*sizes.pattern} != {MAMBA}:
        raise ValueError(f"--workload: got {plan.run.workload}, expected mamba2 with --part model: others decode otherwise")
    return Mamba2LM(make_config(sizes), variant=plan.run.variant, **made)


def _make_call(model: nn.Module, part: str, mode: str, batch: int, seqlen: int) -> Callable[[], Tensor]:
    weight = next(p for p in model.parameters() if p.dim() == 2)
    size = (batch,) if mode == "decode" else (batch, seqlen)
    if part == "model":
        u = torch.randint(model.config.vocab_size, size, device=weight.device)
    else:
        u = torch.randn(*size, model.in_proj.in_features, device=weight.device, dtype=weight.dtype)
    if mode == "decode":
        cache = model.new_cache(batch)
        return torch.no_grad()(lambda: model.step(u, cache))
    if mode == "fwd":
        return timing.make_call(lambda: model(u), "fwd", (), None)
    return timing.make_call(lambda: model(u), mode, (u.requires_grad_(), *model.parameters()), torch.randn_like(u))


def _measure_steps(plan: Plan, part: str, mode: str, seqlen: int, console: Console) -> dict[float, dict]:
    """Of a training step, captured where it can be, one ratio after another: memory is that of one model with its optimizer.
    peak_mib is of all of it. A ratio whose step cannot run, for want of memory, say, is left out, and said.
    """
    found, base = {}, replace(plan.run, seqlen=seqlen)
    graph = step_graph.choose(None, [base], make_single(), console)
    with TemporaryDirectory() as folder:
        for ratio in (0.0, *plan.ratios):
            with leave_out(console, f"{part} {seqlen} without {ratio} of its {plan.kind}"):
                found[ratio] = _measure_step(plan, base, ratio, Path(folder, f"{ratio}"), graph, console)
    return found


def _measure_step(plan: Plan, base: Run, ratio: float, start: Path, graph: bool, console: Console) -> dict:
    model = get_workload(base.workload).build(base.sizes, base.variant, False)
    if ratio:
        pruning.save(_prune(model, plan, ratio), start, {})
    facts = _describe(model, plan.kind)
    del model
    one = replace(base, start=str(start) if ratio else None)
    (values,) = measure_steps(one, [Candidate(base.variant)], plan.repeats, plan.warmup, console, graph).values()
    if "note" in values:
        raise RuntimeError(values["note"])
    return {key: values[key] for key in _OF_STEP} | facts


_OF_STEP = ("p20_us", "p50_us", "p80_us", "unit", "units_per_s", "peak_mib", "ssm_us", "graph", "idle_pct")


def _describe(model: nn.Module, kind: str) -> dict[str, Any]:
    """Sizes of the first block, and of all weights."""
    block = next(iter(pruning.find_blocks(model, kind).values()))
    return {**block.sizes(), "parameters": sum(p.numel() for p in model.parameters()),
            "weights_mib": sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20}
