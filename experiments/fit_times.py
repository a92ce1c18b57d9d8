"""Refits the constants of `fused.time_model` on the current GPU, and writes fused/configs/<gpu>.json.

Each constant stands in a formula of the model that is linear in it. So kernels are timed in cuts that are forced, and the
formulas are solved for their constants by least squares of relative errors.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch
from rich.console import Console

from fused import schedule
from fused.time_model import CONFIGS, Cut, Step, TimeModel, get_time_model
from ssd.kernels.arguments import cdiv
from ssd.registry import get_variant
from ssd.runtime import tuning
from ssd.runtime.devices import is_hopper
from ssd.types import SUB_CHUNK, Options, SSDGrads, SSDInputs, SSDSaved

from . import timing
from .files import replace_file
from .inputs import make_inputs
from .shapes import Shape
from .tune import measure_kernels

_REPEATS = 20
Observation = tuple[dict[str, float], float]  # of each constant how often it is in the time, and the time in microseconds


def run(console: Console) -> None:
    """Times kernels, a minute or two, and writes the file. A constant for which the times leave nothing stays as it was."""
    gpu = torch.cuda.current_device()
    device = tuning.current_device(gpu)
    model = get_time_model(device.name)
    found = _fit_plain(device)
    if is_hopper(torch.device("cuda", gpu)):
        found |= _fit_hopper(replace(model, **found), device.sms)
    for name, value in found.items():
        becomes = f"-> {value}" if value else "stays; the times leave nothing for it"
        console.print(f"{name}: {getattr(model, name)} {becomes}")
    found = {name: value for name, value in found.items() if value}
    CONFIGS.mkdir(exist_ok=True)
    with replace_file(CONFIGS / f"{device.name}.json") as part:
        part.write_text(replace(model, **found).write())


def solve(observations: list[Observation]) -> dict[str, float]:
    """The constants, none below zero, that come nearest to the observed times, by least squares of relative errors."""
    names = list(dict.fromkeys(name for coefficients, _ in observations for name in coefficients))
    values = dict.fromkeys(names, 0.0)
    while names:
        rows = [[coefficients.get(name, 0.0) / us for name in names] for coefficients, us in observations]
        ones = torch.ones(len(rows), 1, dtype=torch.float64)
        solved = torch.linalg.lstsq(torch.tensor(rows, dtype=torch.float64), ones, driver="gelsd").solution[:, 0].tolist()
        if min(solved) >= 0:
            return values | dict(zip(names, solved, strict=True))
        names = [name for name, value in zip(names, solved, strict=True) if value > 0]
    return values


def solve_step(times: dict[int, float]) -> Step:
    """The step of a walk from the time of a sub-chunk by how many blocks walk side by side."""
    powers = solve([({"alone": 1.0, "shared": blocks**4}, us**4) for blocks, us in times.items()])
    return Step(round(powers["alone"] ** 0.25, 4), round(powers["shared"] ** 0.25, 5))


def find_coefficients(model: TimeModel, names: tuple[str, ...], formula: Callable[[TimeModel], float]) -> tuple[dict, float]:
    """How often each constant is in what the formula gives, and the rest. formula: linear in these constants."""
    zero = replace(model, **dict.fromkeys(names, 0.0))
    rest = formula(zero)
    return {name: formula(replace(zero, **{name: 1.0})) - rest for name in names}, rest


def _round(constants: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.3g}") for name, value in constants.items()}


def _inputs(batch: int, seqlen: int, nheads: int, chunk_size: int = 128) -> SSDInputs:
    shape = Shape("fit", batch, seqlen, nheads, headdim=64, dstate=128, ngroups=1)
    return SSDInputs(**make_inputs(shape, torch.bfloat16, "cuda"), chunk_size=chunk_size)


def _time(call: Callable, *kernels: str) -> float:
    """Microseconds of one launch of each of the kernels; without names, of the whole call in a CUDA graph."""
    call()
    if kernels:
        spent = measure_kernels(call, _REPEATS)
        return sum(spent[f"{kernel}_kernel"] for kernel in kernels)
    graph = timing.capture(call)
    return timing.interleave({"call": graph}, _REPEATS, 3, ahead=True)["call"][1]


@contextmanager
def _choose(function: str, choice: object) -> Iterator[None]:
    """Has a function of the schedules choose so, whatever tables an earlier choice has left."""
    with patch(function, lambda *_: choice), patch.dict("ssd.runtime.tables._kept", clear=True):
        yield


def _forward(name: str, inputs: SSDInputs, save: bool = False, **options) -> Callable:
    return lambda: get_variant(name).forward(inputs, Options(**options), save)


def _backward(saved: SSDSaved, dout: torch.Tensor) -> Callable:
    return lambda: get_variant("fused").backward(saved, dout, None, SSDGrads())


def _fit_hopper(model: TimeModel, sms: int) -> dict[str, object]:
    walks = {"scan_step": ("persistent", False, "hopper_scan"), "kept_scan_step": ("persistent", True, "hopper_scan"),
             "every_state_step": ("fused", True, "hopper_states"),
             "few_states_step": ("fused", False, "hopper_states")}
    found: dict[str, object] = {}
    for name, (variant, save, kernel) in walks.items():
        steps = {}
        for blocks in (sms // 8, sms // 2, sms):
            short, long = (_time(_forward(variant, _inputs(1, SUB_CHUNK * nsub, 2 * blocks), save, segments=False), kernel)
                           for nsub in (32, 96))
            steps[blocks] = (long - short) / 64
        found[name] = solve_step(steps)
    model = replace(model, **found)
    found |= _fit_cuts(model, sms)
    found |= _fit_two_level(sms)
    return found | _fit_group(sms)


def _fit_cuts(model: TimeModel, sms: int) -> dict[str, float]:
    names, nsub, observations = ("segment_start", "state_pass_launch", "state_pass_step", "piece_join"), 128, []
    for pairs in (sms // 16, sms // 4, 3 * sms // 4):
        forward = _forward("persistent", _inputs(1, SUB_CHUNK * nsub, 2 * pairs))
        around = _time(forward, "chunk_cumsum")
        for cut in (Cut(nsub, nsub), Cut(64, 16), Cut(64, 64), Cut(43, 10), Cut(32, 32), Cut(cdiv(pairs * nsub, sms), None)):
            with _choose("fused.schedule._choose_cut", cut):
                us = _time(forward) - around
            coefficients, rest = find_coefficients(
                model, names, lambda m, pairs=pairs, cut=cut: m.time_cut(m.scan_step, pairs, nsub, sms, cut))
            observations.append(({**coefficients, "overhead": 1.0}, us - rest))
    return _round({name: value for name, value in solve(observations).items() if name != "overhead"})


def _fit_two_level(sms: int) -> dict[str, float]:
    observations = []
    for pairs, nsub in ((sms // 4, 64), (sms // 2, 64), (sms, 64)):
        forward = _forward("fused", _inputs(1, SUB_CHUNK * nsub, 2 * pairs))
        for segment in schedule.TWO_LEVEL_SEGMENTS:
            rounds = cdiv(pairs * cdiv(nsub, segment), sms)
            with _choose("fused.hopper.choose_two_level_segment", segment):
                us = _time(forward, "hopper_scan")
            observations.append(({"step": rounds * segment, "start": rounds}, us))
    found = solve(observations)
    return _round({"two_level_start": found["start"] / found["step"]})


def _fit_group(sms: int) -> dict[str, float]:
    observations = []
    for seqlen, heads in ((1024, 64), (4096, 32), (8192, 64)):
        inputs = _inputs(1, seqlen, heads)
        variant, dout = get_variant("fused"), torch.randn_like(inputs.x)
        saved, tiles = variant.forward(inputs, Options(), True)[2], cdiv(seqlen, SUB_CHUNK)
        for splits in (1, 2, 4):
            with _choose("fused.hopper_backward.choose_splits", splits):
                kernels = ("hopper_group", "sum_parts") if splits > 1 else ("hopper_group",)
                us = _time(_backward(saved, dout), *kernels)
            rounds = cdiv(tiles * splits, sms)
            observations.append(({"head": rounds * cdiv(heads, splits), "tile": rounds, "part": rounds * (splits > 1)}, us))
    found = solve(observations)
    return _round({"group_tile": found["tile"] / found["head"], "group_partial_sum": found["part"] / found["head"]})


def _fit_plain(device: tuning.Device) -> dict[str, float]:
    walks, chunks, passes = {"chunk_state_passing": [], "dstates_passing": []}, [], []
    variant = get_variant("fused")
    for batch, seqlen, nheads in ((1, 4096, 24), (1, 16384, 24), (4, 4096, 64), (1, 8192, 128)):
        inputs = _inputs(batch, seqlen, nheads, chunk_size=64)
        dout, options = torch.randn_like(inputs.x), Options(gluon=False)
        with patch("fused.forward.should_walk", lambda *_: True), patch("fused.plain_states.should_walk", lambda *_: True):
            saved = variant.forward(inputs, options, True)[2]
            for kernel, call in (
                    ("chunk_state_passing", _forward("fused", inputs, gluon=False)),
                    ("dstates_passing", _backward(saved, dout))):
                config = tuning.pick(kernel, inputs)
                programs = batch * nheads * cdiv(64, config["BLOCK_P"]) * cdiv(128, config["BLOCK_N"])
                waves = cdiv(programs, 8 * device.sms)
                walks[kernel].append(({"step": waves * cdiv(seqlen, SUB_CHUNK)}, _time(call, kernel)))
        with patch("fused.forward.should_walk", lambda *_: False):
            us = _time(_forward("fused", inputs, gluon=False), "chunk_state", "state_passing")
        elements = inputs.nchunks * nheads * batch * 64 * 128
        chunks.append(({"chunks_launch": 1.0, "chunks_step": inputs.nchunks, "us_per_byte": 10 * elements}, us))
        with patch("persistent.forward.cut_evenly", lambda seqlen, *_: schedule.Schedule(2, 1, seqlen // 2)):
            cut = _forward("persistent", inputs, gluon=False)
            passes.append(_time(cut, "chunk_state_passing") / _time(cut, "stationary_scan"))
    found = solve(chunks)
    return _round({
        "walk_states_step": solve(walks["chunk_state_passing"])["step"],
        "walk_dstates_step": solve(walks["dstates_passing"])["step"],
        "chunks_launch": found["chunks_launch"], "chunks_step": found["chunks_step"],
        "chunks_bytes_per_us": 1 / max(found["us_per_byte"], 1e-12), "plain_state_pass": sorted(passes)[len(passes) // 2]})
