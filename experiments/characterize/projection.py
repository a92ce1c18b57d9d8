"""What a call would take on another GPU: constants fitted to the rows of one GPU, carried over, and put to the test there.

    t = launches l + sum over launches of (exposed / B + ((hidden / B)^4 + (sum of c work)^4)^(1/4))

B is the GPU's measured copy. Bytes that warps of their own fetch are hidden: the shorter of them and the work all but vanishes,
as in `fused.time_model`. All others are exposed: the work waits for them. `CONSTANTS` are l and the c, in microseconds; `calls`
counts what they are multiplied with. The matrix units' rate is none of them: no kernel that ncu counted keeps them busy for
half of its time.

Constants minimise the sum of squared relative errors, by Gauss and Newton's method on their logarithms, from 1 each; one that
no row depends on stays there and predicts nothing.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median, mode
from typing import NamedTuple

import numpy as np

from ssd import cost

from .. import record, table
from ..shapes import MODELS
from ..workloads import get_workload
from . import calls
from .definitions import make_problem
from .gpus import GPU, GPUS, find

CONSTANTS = {
    "launch": "a launch in a CUDA graph, its beginning and its end",
    calls.TORCH: "one that mamba_ssm's backward leaves to torch, and what it does",
    "chunk of baseline": "a chunk of the recurrence between chunks, after the one before",
    "chunk of mamba_ssm": "the same",
    "L2 of baseline": "CB from L2 for each head, with its exponentials; fitted in µs a MB",
    "L2 of mamba_ssm": "the same, with B and C for each head",
    "states": "a step of hopper_states",
    "scan": "a step of hopper_scan",
    "group": "a slice of a tile of hopper_group",
}
_OVERLAP = 4
_TURNS, _NUDGE, _RANK, _CONVERGED = 200, 1e-5, 1e-6, 1e-9


class Sample(NamedTuple):
    """Something that was timed, and what it does. gpu: a key of GPUS."""

    gpu: str
    variant: str
    mode: str
    shape: str
    chunk_size: int | None
    us: float
    launches: int
    parts: list[calls.Part]


@dataclass(frozen=True)
class Model:
    """What a time on one GPU is made of.

    Attributes:
        memory_gbps: its copy's rate.
        constants: in microseconds, in the order of CONSTANTS.
        spreads: how far each constant is from fixed by the rows: its standard error, relative.
    """

    memory_gbps: float
    constants: tuple[float, ...]
    spreads: tuple[float, ...] = ()

    def predict(self, samples: list[Sample]) -> np.ndarray:
        """The predicted microseconds of each sample."""
        return _prepare(samples, self.memory_gbps)(np.array(self.constants))

    def carry(self, source: GPU, target: GPU, memory_gbps: float | None = None) -> "Model":
        """The constants of another GPU: steps as its clock is, L2 as its clock and its SMs are; a launch stays a launch.

        memory_gbps: the other's copy; None if nobody measured it: the same share of the data sheet's rate.
        """
        clock = source.clock_ghz / target.clock_ghz
        sms = source.sms.value / target.sms.value
        factors = [1.0 if name in ("launch", calls.TORCH) else clock * sms if name.startswith("L2") else clock
                   for name in CONSTANTS]
        memory_gbps = memory_gbps or self.memory_gbps * target.hbm_gbps.value / source.hbm_gbps.value
        return Model(memory_gbps, tuple(c * factor for c, factor in zip(self.constants, factors, strict=True)))


@dataclass(frozen=True)
class Outcome:
    """A sample, and what constants fitted to other rows said of it."""

    sample: Sample
    predicted_us: float

    @property
    def error(self) -> float:
        """The relative error of the prediction: 0.1 is a tenth too long."""
        return self.predicted_us / self.sample.us - 1


class Errors(NamedTuple):
    """Relative, without sign. weighted: the sum of the errors in microseconds over that of the measured times."""

    median: float
    weighted: float
    worst: float


def summarise(outcomes: list[Outcome]) -> Errors:
    """The median error of a call, the error weighted with time, as calls count in a step, and the largest."""
    errors = [abs(one.error) for one in outcomes]
    apart = sum(abs(one.predicted_us - one.sample.us) for one in outcomes)
    return Errors(median(errors), apart / sum(one.sample.us for one in outcomes), max(errors))


def fit(samples: list[Sample], memory_gbps: float) -> Model:
    """The constants that are nearest to the samples' times.

    Raises:
        ValueError: fewer samples than constants.
    """
    if len(samples) < len(CONSTANTS):
        raise ValueError(f"got {len(samples)} samples, expected at least {len(CONSTANTS)}, one for each constant")
    predict, us = _prepare(samples, memory_gbps), np.array([one.us for one in samples])

    def miss(at: np.ndarray) -> np.ndarray:
        return predict(np.exp(at)) / us - 1

    at = np.zeros(len(CONSTANTS))
    for _ in range(_TURNS):
        missed = miss(at)
        slopes = np.stack([(miss(at + move) - miss(at - move)) / (2 * _NUDGE) for move in _NUDGE * np.eye(len(at))], 1)
        step = np.clip(np.linalg.lstsq(slopes, -missed, rcond=_RANK)[0], -1, 1)
        while np.abs(step).max() > _CONVERGED and (miss(at + step) ** 2).sum() > (missed**2).sum():
            step = step / 2
        at = at + step
        if np.abs(step).max() <= _CONVERGED:
            break
    noise = (missed**2).sum() / max(1, len(samples) - len(at))
    spreads = np.where(slopes.any(0), np.sqrt(noise * np.diag(np.linalg.pinv(slopes.T @ slopes))), np.inf)
    return Model(memory_gbps, tuple(np.exp(at).tolist()), tuple(spreads.tolist()))


def find_fixed(samples: list[Sample]) -> set[str]:
    """The constants that the samples can fix: some sample depends on them."""
    return {"launch"} | {name for one in samples for part in one.parts for name, often in part.work.items() if often}


def choose_fitted(samples: list[Sample]) -> list[Sample]:
    """What a fit sees: not the shapes of published models, unless the others leave a constant open that those fix."""
    models = {shape.name for shape in MODELS}
    others = [one for one in samples if one.shape not in models]
    return others if find_fixed(others) == find_fixed(samples) else samples


def predict_across(samples: list[Sample], memory: dict[str, float], source: str, target: str) -> list[Outcome]:
    """Every sample of one GPU, predicted from the rows of another and from the one's copy alone."""
    model = fit(choose_fitted([one for one in samples if one.gpu == source]), memory[source])
    return apply(model.carry(GPUS[source], GPUS[target], memory[target]), [one for one in samples if one.gpu == target])


def apply(model: Model, samples: list[Sample]) -> list[Outcome]:
    """A model's prediction for each sample."""
    return [Outcome(one, us) for one, us in zip(samples, model.predict(samples).tolist(), strict=True)] if samples else []


def read_memory(rows: list[dict]) -> dict[str, float]:
    """{GPU: GB/s of its copy, the median over the rows of the bench ssd}, in the order of GPUS."""
    found = record.group_by(record.read(rows, bench="ssd"), _name_gpu)
    return {name: median(row["copy_gbps"] for row in found[name]) for name in GPUS if name in found}


def find_interval(outcomes: list[Outcome]) -> tuple[float, float]:
    """The multiples of a prediction between which nine of ten measured times lie."""
    low, high = np.quantile([one.sample.us / one.predicted_us for one in outcomes], (0.05, 0.95)).tolist()
    return low, high


def read_calls(rows: list[dict]) -> list[Sample]:
    """Forwards and backwards in CUDA graphs, of GPUs whose copy is known, as the benches ssd and regress timed them last.

    Of fused and persistent those that ran the kernels for Hopper, which heed no chunk size: of several the last. Older rows do
    not say what ran: kernels then took these sizes alone. Those of regress do not say how many launches were made, as others
    need to.
    """
    memory = read_memory(rows)
    timed = [row for row in record.read(rows, bench="ssd") if record.has_default_options(row)]
    timed = table.keep_last_commit(timed) + [row for row in record.read(rows, bench="regress")
                                             if row["variant"] not in calls.PLAIN]
    timed = [row for row in timed if row["mode"] in calls.MODES and row["graph_p50_us"] and _is_covered(row, memory)]
    timed = record.latest(timed, lambda row: (row["gpu"], row["variant"], row["mode"], row["shape"],
                                              row["chunk_size"] if row["variant"] in calls.PLAIN else None))
    return [_make_sample(row, row, row["graph_p50_us"], [(row["mode"], make_problem(row), row.get("launches"))])
            for row in timed]


def read_steps(rows: list[dict]) -> list[Sample]:
    """The kernels of the operator in one training step, where the workload can list its scans: a forward that a backward
    follows and that backward for each. As they were measured last.
    """
    memory = read_memory(rows)
    steps = [row for row in record.read(rows, bench="step") if row.get("ssm_us") and row["run"]["mixer"] == "ssd"]
    steps = record.latest(steps, lambda row: (row["gpu"], row["workload"], row["preset"], row["variant"]))
    usual = {key: mode(row["launches"] for row in of) for key, of in record.group_by(
        record.read(rows, bench="ssd"), lambda row: (row["variant"], row["mode"])).items() if key[0] in calls.PLAIN}
    usual["mamba_ssm", "bwd"] = calls.OWN_LAUNCHES  # the kernels of a step that are the SSM's are known by their names
    found = []
    for row in steps:
        workload = get_workload(row["workload"])
        if workload.scans is None:
            continue
        scans = workload.scans(workload.presets[row["preset"]].sizes, row["batch"], row["seqlen"])
        if not all(_is_covered(row | asdict(problem), memory) for problem in scans):
            continue
        made = [(of, problem, usual.get((row["variant"], of))) for problem in scans for of in ("fwd_train", "bwd")]
        what = {"mode": "step", "shape": f"{row['workload']} {row['preset']}", "chunk_size": None}
        found.append(_make_sample(row, what, row["ssm_us"], made * row["run"]["accumulate"]))
    return found


def _make_sample(row: dict, what: dict, us: float, made: list[tuple[str, cost.Problem, int | None]]) -> Sample:
    """made: direction, sizes and launches of each call; of fused and persistent launches are counted where they are None."""
    parts, launches, gpu = [], 0, _name_gpu(row)
    for direction, problem, known in made:
        if row["variant"] in calls.HOPPER:
            counted = calls.count_hopper(row["variant"], direction, problem, gpu)
        else:
            counted = calls.count_plain(row["variant"], direction, problem, known)
        parts += counted
        launches += (known or len(counted)) - sum(part.work.get(calls.TORCH, 0) for part in counted)
    return Sample(gpu, row["variant"], what["mode"], what["shape"], what["chunk_size"], us, launches, parts)


def _is_covered(row: dict, memory: dict[str, float]) -> bool:
    """Whether `calls` counts the kernels that ran, and the copy of their GPU is known."""
    if row["dtype"] != "bf16" or _name_gpu(row) not in memory:
        return False
    ran = row.get("ran")
    on_hopper = ran.endswith("on Hopper") if ran else (row["headdim"], row["dstate"]) == (64, 128)
    return row["variant"] in calls.PLAIN or (row["variant"] in calls.HOPPER and on_hopper)


def _name_gpu(row: dict) -> str | None:
    gpu = find(row["gpu"])
    return next((key for key, known in GPUS.items() if known is gpu), None) if gpu else None


def _prepare(samples: list[Sample], memory_gbps: float) -> Callable[[np.ndarray], np.ndarray]:
    """From constants to the microseconds of each sample."""
    parts = [part for one in samples for part in one.parts]
    owner = np.repeat(np.arange(len(samples)), [len(one.parts) for one in samples])
    launches = np.array([one.launches for one in samples], float)
    exposed, hidden = (np.array([getattr(part, name) for part in parts]) / memory_gbps / 1e3 for name in ("exposed", "hidden"))
    work = np.array([[part.work.get(name, 0.0) for name in CONSTANTS] for part in parts])

    def predict(constants: np.ndarray) -> np.ndarray:
        times = exposed + (hidden**_OVERLAP + (work @ constants) ** _OVERLAP) ** (1 / _OVERLAP)
        return constants[0] * launches + np.bincount(owner, times, len(samples))

    return predict
