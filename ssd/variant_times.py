"""How long the kernels of a variant are expected to take: a table of measured calls, and a cost model between and beyond them.

A table, `configs/variants/<gpu>.json`, has the measured calls, each with the time of every set of kernels that ran it, and the
constants of the cost model for each set of kernels. `python -m experiments choose` writes it from rows. The model says how a
time grows with the work of a call (`count_work`); the nearest measured call says by how much the model errs around there.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, astuple, dataclass, replace
from functools import cached_property, lru_cache

from .cost import Problem, count_ideal_backward, count_ideal_forward
from .runtime.tuning import CONFIGS, next_power_of_2
from .types import SUB_CHUNK, SSDInputs

TABLES = CONFIGS / "variants"
FALLBACK = "h200"  # whose constants a GPU has for kernels that were not measured on it
_SMALLEST_TILE = 16
_STATE_ELEMENTS = 8192  # of a state that a block walks with
_TF32_PRODUCTS = 6  # the time of an fp32 product in that of a bf16 one: three TF32 products, each at half the rate
_DOUBLINGS = 2  # within which the error of the model is taken to halve
# how far apart a doubling of each size puts two calls, and what else does
_APART = {"sequences": 1.0, "seqlen": 1.0, "chunk_size": 0.5, "headdim": 2.0, "dstate": 2.0, "heads_a_group": 0.25}
_APART_IN_KIND = 1.0  # states kept or not, a gate or none


@dataclass(frozen=True)
class Call:
    """What a time depends on beside the kernels and the GPU.

    Attributes:
        mode: "fwd" or "bwd".
        keeps: whether states are kept between the two.
        itemsize: bytes of an element of x.
        gated: whether z is given.
    """

    mode: str
    keeps: bool
    itemsize: int
    batch: int
    seqlen: int
    nheads: int
    headdim: int
    dstate: int
    ngroups: int
    chunk_size: int
    gated: bool = False

    @classmethod
    def of(cls, i: SSDInputs, mode: str, keeps: bool) -> Call:
        return cls(mode, keeps, i.x.dtype.itemsize, i.batch, i.seqlen, i.nheads, i.headdim, i.dstate, i.ngroups, i.chunk_size,
                   i.z is not None)

    def __str__(self) -> str:
        kinds = f"{', states kept' if self.keeps else ''}{', z' if self.gated else ''}"
        return (f"{self.mode} of {self.batch} x {self.seqlen}, heads {self.nheads} / {self.headdim} / {self.dstate} / "
                f"{self.ngroups}, chunk {self.chunk_size}, {self.itemsize} bytes an element{kinds}")

    @cached_property
    def place(self) -> tuple[float, ...]:
        """Coordinates, between which `measure_distance` measures."""
        sizes = {"sequences": self.batch * self.nheads, "heads_a_group": self.nheads / self.ngroups, **asdict(self)}
        return (*(apart * math.log2(sizes[name]) for name, apart in _APART.items()), _APART_IN_KIND * self.keeps,
                _APART_IN_KIND * self.gated)

    def is_comparable(self, other: Call) -> bool:
        """Whether one says anything about the other: both of one mode and element size."""
        return self.mode == other.mode and self.itemsize == other.itemsize

    def measure_distance(self, other: Call) -> float:
        """How far apart two calls are, in doublings of the work."""
        return sum(abs(a - b) for a, b in zip(self.place, other.place, strict=True))


def count_work(call: Call) -> dict[str, float]:
    """What the cost model multiplies with its constants:

    launch: 1, of all launches.
    tokens: MB of the inputs and outputs.
    chunk_states, block_states: MB of a state for each chunk, and for each sub-chunk.
    products: GFLOP of matrix products with a causal chunk computed whole, in tiles of powers of two.
    steps: thousands of sub-chunks that thread blocks walk, all together.
    cut: the root of the number of sub-chunks. A long sequence of few heads, cut where that is best, takes as long.
    moved_states, moved_steps: block_states and steps where a forward keeps states, or a backward computes them again.
    """
    i = call
    problem = Problem(i.batch, i.seqlen, i.nheads, i.headdim, i.dstate, i.ngroups, i.chunk_size, i.itemsize, gated=i.gated)
    forward = i.mode == "fwd"
    ideal = (count_ideal_forward if forward else count_ideal_backward)(problem)
    width, states = (max(_SMALLEST_TILE, next_power_of_2(size)) for size in (i.headdim, i.dstate))
    chunk = min(i.chunk_size, max(_SMALLEST_TILE, i.seqlen))
    nsub = -(-i.seqlen // SUB_CHUNK)
    flops = 2 * problem.D * width * (2 * states + chunk) * (1 if forward else 2.5)
    moved = forward == i.keeps
    work = {
        "launch": 1.0,
        "tokens": ideal.bytes / 1e6,
        "chunk_states": problem.S * i.itemsize / 1e6,
        "block_states": nsub * problem.state * i.itemsize / 1e6,
        "products": flops * (_TF32_PRODUCTS if i.itemsize == 4 else 1) / 1e9,
        "steps": nsub * i.batch * i.nheads * max(1.0, width * states / _STATE_ELEMENTS) / 1e3,
        "cut": math.sqrt(nsub),
    }
    return work | {"moved_states": moved * work["block_states"], "moved_steps": moved * work["steps"]}


@dataclass(frozen=True)
class Estimate:
    """A time that is expected, in microseconds. near: the measured call that corrects the model, if there is one."""

    us: float
    near: Call | None = None
    distance: float = 0.0


@dataclass(frozen=True)
class TimeTable:
    """What is known of one GPU.

    Attributes:
        constants: of the cost model, in microseconds, by mode and kernels and then by the names of `count_work`.
        calls: the measured time in microseconds of each set of kernels, by call.
    """

    constants: dict[tuple[str, str], dict[str, float]]
    calls: dict[Call, dict[str, float]]

    def estimate(self, call: Call, kernels: str) -> Estimate | None:
        """The time that is expected of the kernels; None if there are no constants for them."""
        constants = self.constants.get((call.mode, kernels))
        if constants is None:
            return None
        us = apply_model(constants, call)
        near = [other for other, times in self.calls.items() if kernels in times and call.is_comparable(other)]
        if not near:
            return Estimate(us)
        nearest = min(near, key=call.measure_distance)
        distance = call.measure_distance(nearest)
        error = self.calls[nearest][kernels] / apply_model(constants, nearest)
        return Estimate(us * error ** 2 ** (-distance / _DOUBLINGS), nearest, distance)

    def write(self) -> str:
        """The table as the text of a file."""
        constants = (f'    "{mode} {kernels}": {json.dumps(of)}' for (mode, kernels), of in sorted(self.constants.items()))
        ordered = sorted(self.calls.items(), key=lambda item: astuple(item[0]))
        calls = (f"    {json.dumps({**asdict(call), 'us': dict(sorted(times.items()))})}" for call, times in ordered)
        return '{{\n  "constants": {{\n{}\n  }},\n  "calls": [\n{}\n  ]\n}}\n'.format(",\n".join(constants), ",\n".join(calls))

    @classmethod
    def read(cls, text: str) -> TimeTable:
        """The table from the text of a file."""
        found = json.loads(text)
        constants = {tuple(name.split(" ", 1)): of for name, of in found["constants"].items()}
        return cls(constants, {Call(**call): times for call in found["calls"] for times in (call.pop("us"),)})


def apply_model(constants: dict[str, float], call: Call) -> float:
    """The model's time in microseconds."""
    return sum(constants[name] * amount for name, amount in count_work(call).items())


@lru_cache
def get_table(gpu: str) -> TimeTable | None:
    """The table of a GPU by the name that `tuning.Device` gives it, with constants of `FALLBACK` for kernels that have none of
    their own. None: the GPU has no table.
    """
    table = _read(gpu)
    return table and replace(table, constants=get_fallback().constants | table.constants)


@lru_cache
def get_fallback() -> TimeTable:
    """The cost model alone, for a GPU without a table."""
    table = _read(FALLBACK)
    return TimeTable({}, {}) if table is None else replace(table, calls={})


def _read(gpu: str) -> TimeTable | None:
    path = TABLES / f"{gpu}.json"
    return TimeTable.read(path.read_text()) if path.exists() else None
