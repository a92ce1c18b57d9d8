"""What stands beside every number that the papers print: of "the paper", and, marked [2], of another's abstract."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from statistics import mean
from string import ascii_lowercase

from ... import table
from ...kernel_names import is_of_operator
from ...pruning import speed, tables
from ...shapes import DIRECTIONS
from .. import classes, components, definitions
from ..classes import BOTH, TENSOR, VECTOR
from ..definitions import Call
from ..gpus import GPUS, find
from . import bandwidth, kernels, steps
from .figure import shorten

# Table II: {mode: {class: (kernels, per cent of the time)}}
TABLE_TWO = {"fwd": {TENSOR: (1, 2.40), VECTOR: (2, 8.55), BOTH: (2, 89.03)},
             "bwd": {TENSOR: (1, 1.26), VECTOR: (2, 6.86), BOTH: (6, 91.87)}}
UPSTREAM = "mamba_ssm"
TABLE_LINES = sum(map(len, TABLE_TWO.values()))
FP8_PER_CLOCK = 8192  # dense FP8 operations of an SM, NVIDIA H100 Tensor Core GPU Architecture white paper


def collect(calls: list[Call], rows: list[dict]) -> dict:
    """What was counted on one GPU of the kernels that stand beside the paper's: whose, by mode; their ratios; the training
    step that gains most without some states; and which lengths were measured.
    """
    whose, found = _choose_calls(calls)
    done = [(classes.work(kernel), kernel) for call in found.values() for kernel in call.kernels]
    mixed = [(work, kernel) for work, kernel in done if work.tensor and work.ratio is not None]
    of_states = [gain for gain in tables.list_gains(speed.read_latest(rows))
                 if (gain.row["part"], gain.row["kind"]) == ("step", "states")]
    return {
        "whose": whose, "used": {mode: _describe_use(call) for mode, call in found.items()},
        "table_two": [line for mode in TABLE_TWO for line in _list_shares(mode, found.get(mode))],
        "ratios": [work.ratio for work, _ in mixed], "below": _count_below(work.ratio for work, _ in mixed),
        "by_counters": any(work.source == "counters" for work, _ in mixed),
        "below_with_exps": _count_below(work.tensor / (work.vector + kernel["exps"]) for work, kernel in mixed)
        if mixed and all("exps" in kernel for _, kernel in mixed) else None,
        "pruned": max(of_states, key=lambda gain: gain.faster, default=None),
        "lengths": _find_range(components.read_latest(rows)),
        "operator_lengths": _find_range(row for row in table.read_latest(rows) if row["shape"].startswith("sweep-"))}


def choose_columns(of_gpus: dict[str, dict]) -> dict[str, dict]:
    """What each GPU's rows say, by its name, of the GPUs that have any for the table; one without a name where none has."""
    found = {gpu: of for gpu, of in of_gpus.items()
             if of["steps"] or any(of["paper"][key] for key in ("used", "pruned", "lengths", "operator_lengths"))}
    return found or {"": {"steps": {}, "paper": collect([], [])}}


def write_line(what: str, paper: str, cells: list[tuple[str, str]]) -> str:
    """A line of the table before `share_reasons`: what it is of, the paper's number, one of each GPU, and why they differ.

    cells: of each GPU its name, and `number | reason; reason`. A reason that not all GPUs with one have is marked by its GPU.
    """
    split = [(gpu, *(part.strip() for part in cell.partition("|")[::2])) for gpu, cell in cells]
    reasons = {gpu: why.split("; ") for gpu, _, why in split if why}
    shared = [reason for reason in next(iter(reasons.values()), []) if all(reason in why for why in reasons.values())]
    own = [f"{gpu}: {reason}" for gpu, why in reasons.items() for reason in why if reason not in shared]
    return " | ".join([what, paper, *(number for _, number, _ in split), "; ".join(own + shared)])


def share_reasons(text: str) -> str:
    """The lines of a table, whose last cells have reasons with semicolons between; with a letter for each reason that several
    have, and a paragraph that explains the letters, if there are any.
    """
    rows = [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]
    counted = Counter(reason for row in rows for reason in row[-1].split("; ") if reason)
    letters = dict(zip((reason for reason, count in counted.items() if count > 1), ascii_lowercase, strict=False))
    for row in rows:
        reasons = row[-1].split("; ")
        own, shared = "; ".join(r for r in reasons if r not in letters), ", ".join(letters[r] for r in reasons if r in letters)
        row[-1] = f"{own} ({shared})".strip() if shared else own
    explained = " ".join(f"**({letter})** {reason}." for reason, letter in letters.items())
    return f"{table.render_lines(rows)}\n{explained}\n"


def find_most(shares: dict[str, dict[str, float]], *kinds: str, workload: str = "") -> dict | None:
    """The step of which these classes are the largest share, its share, and how long the GPU is idle in it."""
    found = {name: sum(values[kind] for kind in kinds) for name, values in shares.items() if name.startswith(workload)}
    name = max(found, key=found.get, default=None)
    if name is None:
        return None
    share, idle = found[name], shares[name]["idle"]
    return {"name": name, "share": share, "idle": idle, "waits": idle > steps.WAITS, "of_busy": 100 * share / (100 - idle)}


def _choose_calls(calls: list[Call]) -> tuple[str, dict[str, Call]]:
    """Whose kernels stand beside the paper's, and {mode: call}: upstream's, which the paper's models run, without what it
    leaves to torch; the baseline's where upstream's were not counted in both modes.
    """
    theirs = {call.row["mode"]: replace(call, kernels=tuple(k for k in call.kernels if is_of_operator(k["kernel"])))
              for call in calls if call.row["variant"] == UPSTREAM}
    if theirs.keys() >= DIRECTIONS.keys():
        return UPSTREAM, {mode: theirs[mode] for mode in DIRECTIONS}
    return "the baseline", kernels.baseline(calls)


def _describe_use(call: Call) -> dict:
    """What a call uses of its GPU's peak; and, on another GPU than the paper's, U of an H100's at as many bytes a second, but
    no kernel beyond the peak.
    """
    peak, of_peak = bandwidth.main_peak(call)
    if find(call.row["gpu"]) is GPUS["h100"]:
        return {"peak": peak, "U": of_peak.U, "W": of_peak.W, "there": None}
    used = (definitions.percent_of_peak(kernel["dram_bytes"], kernel["ncu_us"], GPUS["h100"].hbm_gbps.value)
            for kernel in call.kernels)
    return {"peak": peak, "U": of_peak.U, "W": of_peak.W, "there": mean(min(100, one) for one in used)}


def _list_shares(mode: str, call: Call | None) -> list[dict]:
    """The lines of Table II of a mode: the paper's numbers and ours, at which thresholds the counts are the paper's, and else
    which kernels are of the class.
    """
    expected, recomputed = TABLE_TWO[mode], mode == "fwd"
    swept = {threshold: classes.compute_shares(call.kernels, threshold, recomputed) for threshold in classes.THRESHOLDS
             } if call else {}
    like = [f"{100 * threshold:g} %" for threshold, shares in swept.items()
            if all(shares[kind][0] == count for kind, (count, _) in expected.items())]
    modelled = call and any(classes.work(kernel).source != "counters" for kernel in call.kernels)
    return [{"mode": mode, "kind": kind, "count": count, "share": share, "modelled": modelled, "like": like,
             "ours": swept[classes.THRESHOLD][kind] if call else None,
             "kernels": _name_class(call, kind, recomputed) if call else []} for kind, (count, share) in expected.items()]


def _name_class(call: Call, kind: str, recomputed: bool) -> list[str]:
    """Names of a call's kernels of one class, each with its tensor over its vector FLOPs where it has both."""
    kept = [kernel for kernel in call.kernels if recomputed or classes.name_stage(kernel) not in classes.RECOMPUTED]
    done = {shorten(kernel["kernel"]): classes.work(kernel) for kernel in kept}
    return [name if not (work.tensor and work.ratio) else f"{name} ({work.ratio:.0f} : 1)" for name, work in done.items()
            if work.uses(classes.THRESHOLD) == kind]


def _count_below(ratios: Iterable[float]) -> int:
    return sum(ratio < kernels.FMA_RATIO for ratio in ratios)


def _find_range(rows: Iterable[dict]) -> str:
    """The range of the sequences' lengths; nothing without rows."""
    lengths = {row["seqlen"] for row in rows}
    return f"{min(lengths)} to {max(lengths)}" if lengths else ""
