"""Writes the tables that variant "auto" chooses by, ssd/configs/variants/<gpu>.json, from committed rows; and checks them.

A table has every measured call of `shapes.SHAPES`, and the constants of the cost model (`ssd.variant_times`), fitted to them.
The check leaves measured calls out, fits the rest, and says what the choice there would cost.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from fused import hopper
from ssd.auto_variant import rank_kernels
from ssd.registry import get_variant, list_candidates
from ssd.runtime.tuning import device_slug
from ssd.types import Options, SSDInputs
from ssd.variant_times import TABLES, Call, TimeTable, count_work

from . import record
from .shapes import ITEMSIZES, SHAPES, is_gated
from .table import render_lines, write_head

BENCHES = ("ssd", "ablate")
_SWITCHES = ("gluon", "save_states", "fuse_backward")  # that choose kernels; every other option must have its default
_DTYPES = {2: torch.bfloat16, 4: torch.float32}
_ON_HOPPER = re.compile(r"g?h\d+$")
_TIMED = {"fwd": "fwd", "fwd_train": "fwd", "bwd": "bwd"}  # what a mode of the bench times
_FIRST_ON_HOPPER = ((2, 64, 64), (2, 64, 128))  # bytes of an element, headdim, dstate
_FORMS = (Options(), Options(gluon=False))  # of which each has kernels of its own to choose from
# What a constant is taken to be before any row is seen, in microseconds: twice or so what the ceilings of an H200 allow. Each
# counts as `_TRUST` squared of a row, so that what no row tells apart stays near.
_BEFORE = {"launch": 15.0, "tokens": 0.35, "chunk_states": 0.35, "block_states": 0.35, "products": 4.0, "steps": 7.6,
           "cut": 0.7, "moved_states": 0.35, "moved_steps": 2.3}
_TRUST = 0.2
FEWEST = 40  # measured calls of a GPU's table: constants fitted to fewer would say little of other calls
CLOSE, FAR = 0.05, 0.15  # what a choice may cost over the best: in `SHARE` of all, and in all
SHARE = 0.95
_NOTHING = 0.01  # a cost that is noise
_CHECK_HEAD = write_head(f"left out | choices | within {CLOSE:.0%} of the best | the costliest | expected times: median error "
                         "| error in 95 % of them", "left out")
_LOST_HEAD = write_head("left out | call | chosen | best | cost", "left out", "call", "chosen", "best")
SCOPES = {"the call": lambda left, other: left == other,
          "every call of its sizes": lambda left, other: _get_sizes(left) == _get_sizes(other)}


def make_tables(rows: list[dict]) -> dict[str, TimeTable]:
    """The table of each GPU with enough rows of the bench or the ablation: of each kernels' latest row in a call.

    Times are those in a CUDA graph, since which kernels are faster does not depend on the host that launches them. A row says
    which kernels ran. Rows that do not are older than forms for Hopper beside `_FIRST_ON_HOPPER`.
    """
    found: dict[str, dict[Call, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:  # oldest first
        options = _read_options(row) if row["bench"] in BENCHES and row.get("shape") in SHAPES and row["gpu"] else None
        if options is None or row["variant"] not in ("auto", *list_candidates()) or row["mode"] not in _TIMED:
            continue
        if row["variant"] == "auto" and not row.get("ran"):
            continue
        call = _describe_call(row, options)
        first = (call.itemsize, call.headdim, call.dstate) in _FIRST_ON_HOPPER
        ran = row.get("ran") or name_kernels(row, options if first else replace(options, gluon=False))
        found[device_slug(row["gpu"])][call][ran] = round(record.get_us(row), 2)
    return {gpu: TimeTable(_fit(calls), dict(calls)) for gpu, calls in found.items() if len(calls) >= FEWEST}


def name_kernels(row: dict, options: Options | None = None) -> str | None:
    """As `Variant.kernels`, of what a row of the bench is about, by the code as it is. None: of peers, of modes that run
    several sets of kernels, and of "auto" with keep_bytes, by which calls differ.

    options: by default the row's.
    """
    if not row["gpu"] or row["variant"] not in ("auto", *list_candidates()) or row["mode"] not in _TIMED:
        return None
    options, gpu = options or Options(**record.options(row)), device_slug(row["gpu"])
    call = _describe_call(row, options)
    if row["variant"] != "auto":
        return _name_kernels(gpu, row["variant"], call, options)
    if options.keep_bytes:
        return None
    kernels = {name: _name_kernels(gpu, name, call, replace(options, save_states=False)) for name in list_candidates()}
    (first, *_), _ = rank_kernels(call, kernels, gpu)
    return kernels[first]


def write_tables(tables: dict[str, TimeTable], folder: Path = TABLES) -> list[Path]:
    """Replaces the table of each GPU that has one."""
    folder.mkdir(exist_ok=True)
    paths = {gpu: folder / f"{gpu}.json" for gpu in tables}
    for gpu, path in paths.items():
        path.write_text(tables[gpu].write())
    return list(paths.values())


@dataclass(frozen=True)
class Choice:
    """What would have been chosen in a call that is not in the table.

    Attributes:
        measured: microseconds of the kernels that there are to choose from.
        expected: as many, of those of which something is known.
    """

    call: Call
    measured: dict[str, float]
    expected: dict[str, float]

    @property
    def chosen(self) -> str:
        return min(self.expected, key=self.expected.get)

    @property
    def best(self) -> str:
        return min(self.measured, key=self.measured.get)

    @property
    def cost(self) -> float:
        """How much longer the choice takes than the best, relative to the best."""
        return self.measured[self.chosen] / self.measured[self.best] - 1

    @property
    def errors(self) -> list[float]:
        """The errors of the expected times, relative to the measured ones."""
        return [abs(us / self.measured[kernels] - 1) for kernels, us in self.expected.items()]


def check_choices(gpu: str, table: TimeTable, is_left_out: Callable[[Call, Call], bool]) -> list[Choice]:
    """Each choice between two sets of kernels or more, by the table without the calls that are left out with this one."""
    choices = []
    for call, times in table.calls.items():
        groups = {frozenset(name for name in _list_kernels(gpu, call, form) if name in times) for form in _FORMS}
        groups = [group for group in groups if len(group) > 1]
        if not groups:
            continue
        calls = {other: of for other, of in table.calls.items() if not is_left_out(call, other)}
        rest = TimeTable(_fit(calls, call.mode), calls)
        for group in groups:
            estimates = {name: rest.estimate(call, name) for name in sorted(group)}
            expected = {name: found.us for name, found in estimates.items() if found is not None}
            if expected:
                choices.append(Choice(call, {name: times[name] for name in group}, expected))
    return choices


def tabulate_choices(tables: dict[str, TimeTable]) -> str:
    """Markdown of the check on each GPU: how near choices in calls left out come to the best, and every one that loses."""
    parts = []
    for gpu, table in sorted(tables.items()):
        checked = {scope: check_choices(gpu, table, is_left_out) for scope, is_left_out in SCOPES.items()}
        near = [(scope, *_describe_check(choices)) for scope, choices in checked.items() if choices]
        parts.append(f"{gpu}, {len(table.calls)} measured calls:\n\n{_CHECK_HEAD}{render_lines(near)}")
        lost = [(scope, one.call, one.chosen, one.best, f"{one.cost:.1%}") for scope, choices in checked.items()
                for one in sorted(choices, key=lambda one: -one.cost) if one.cost > _NOTHING]
        if lost:
            parts.append(f"Choices that lose more than 1 %:\n\n{_LOST_HEAD}{render_lines(lost)}")
    return "\n".join(parts) or "No rows yet: no GPU has run variants that could be chosen from.\n"


def _describe_check(choices: list[Choice]) -> tuple:
    costs, errors = sorted(one.cost for one in choices), sorted(error for one in choices for error in one.errors)
    close = sum(cost <= CLOSE for cost in costs) / len(costs)
    return (len(costs), f"{close:.0%}", f"{costs[-1]:.1%}", f"{errors[len(errors) // 2]:.0%}",
            f"{errors[int(0.95 * len(errors))]:.0%}")


def _read_options(row: dict) -> Options | None:
    """The row's options; None if they change what kernels do, or are not known any more."""
    given, default = record.options(row) or asdict(Options()), asdict(Options())
    switched = {name: given[name] for name in _SWITCHES}
    return Options(**switched) if given == default | switched else None


def _describe_call(row: dict, options: Options) -> Call:
    sizes = {name: row[name] for name in record.SIZES}
    keeps = row["mode"] != "fwd" and options.save_states and row["variant"] != "auto"
    return Call(_TIMED[row["mode"]], keeps, ITEMSIZES[row["dtype"]], **sizes, chunk_size=row["chunk_size"],
                gated=is_gated(row["shape"]))


def _list_kernels(gpu: str, call: Call, options: Options) -> set[str]:
    """The sets of kernels to choose from."""
    return {_name_kernels(gpu, name, call, options) for name in list_candidates()}


@cache
def _name_kernels(gpu: str, variant: str, call: Call, options: Options) -> str:
    """As `Variant.kernels`, as if on that GPU."""
    def make(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=_DTYPES[call.itemsize], device="meta")

    tokens = call.batch, call.seqlen
    x, B = make(*tokens, call.nheads, call.headdim), make(*tokens, call.ngroups, call.dstate)
    inputs = SSDInputs(x, make(*tokens, call.nheads), make(call.nheads), B, B, call.chunk_size, D=make(call.nheads),
                       z=x if call.gated else None)
    with patch.multiple(hopper, is_hopper=lambda device: bool(_ON_HOPPER.match(gpu)), explain_missing_gluon=lambda: None):
        return get_variant(variant).kernels(inputs, options, call.mode, call.keeps)


def _fit(calls: dict[Call, dict[str, float]], *modes: str) -> dict[tuple[str, str], dict[str, float]]:
    """The constants of the cost model, in these modes or in all: none below zero, by least squares of relative errors."""
    rows: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    for call, times in calls.items():
        for kernels, us in times.items() if not modes or call.mode in modes else ():
            rows[call.mode, kernels].append(_weigh_work(call) / us)
    return {name: _solve(torch.stack(of)) for name, of in rows.items()}


@cache
def _weigh_work(call: Call) -> Tensor:
    work = count_work(call)
    return torch.tensor([work[name] for name in _BEFORE], dtype=torch.float64)


def _solve(rows: Tensor) -> dict[str, float]:
    """The constants whose products with each row add up to about 1, beside what they are before."""
    trusted = torch.full((len(_BEFORE),), _TRUST, dtype=torch.float64)
    before = torch.tensor([*_BEFORE.values()], dtype=torch.float64)
    # not as a matrix product, whose threads take longer to start than this takes
    squares = (rows[:, :, None] * rows[:, None]).sum(0) + torch.diag((trusted / before) ** 2)
    wanted = rows.sum(0) + trusted**2 / before
    kept, solved = torch.arange(len(_BEFORE)), torch.zeros_like(before)
    while len(kept):
        found = torch.linalg.solve(squares[kept][:, kept], wanted[kept])
        if (found >= 0).all():
            solved[kept] = found
            break
        kept = kept[found > 0]
    return {name: float(f"{value:.4g}") for name, value in zip(_BEFORE, solved.tolist(), strict=True)}


def _get_sizes(call: Call) -> Call:
    """The call's sizes alone."""
    return replace(call, mode="fwd", keeps=False, chunk_size=1)
