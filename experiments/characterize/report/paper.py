"""Every number that the papers print, beside ours: of "the paper", and, marked [2], of another's abstract; see `CITED`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import mean
from string import ascii_lowercase

from ... import table
from ...kernel_names import is_of_operator
from ...shapes import DIRECTIONS
from .. import classes, components, definitions
from ..classes import BOTH, TENSOR, VECTOR
from ..definitions import Call
from ..gpus import GPUS
from . import bandwidth, kernels, steps
from .parts import NOT_YET, Section, Table, shorten

CITED = ("**The paper** is T. Baruah, K. Shivdikar, S. Prescott and D. Kaeli, [Characterizing the Behavior of Training "
         "Mamba-based State Space Models on GPUs](https://arxiv.org/abs/2508.17679), arXiv:2508.17679, 2025. **[2]** is A. Al "
         "Asif, M. Kashaniyan, S. Yu, J. P. Muñoz and A. Jannesari, [PerfMamba: Performance Analysis and Pruning of Selective "
         "State Space Models](https://arxiv.org/abs/2511.22849), arXiv:2511.22849, 2025, of which the abstract alone is used.")

# Table II: {mode: {class: (kernels, per cent of the time)}}
TABLE_TWO = {"fwd": {TENSOR: (1, 2.40), VECTOR: (2, 8.55), BOTH: (2, 89.03)},
             "bwd": {TENSOR: (1, 1.26), VECTOR: (2, 6.86), BOTH: (6, 91.87)}}
_UPSTREAM, _H100 = "mamba_ssm", GPUS["h100"]
_FP8_PER_CLOCK = 8192  # dense FP8 operations of an SM, NVIDIA H100 Tensor Core GPU Architecture white paper


def section(calls: list[Call], out: Path) -> Section:
    """Paper / ours."""
    rows, notes = share_reasons(compare(calls, out))
    note = ("The paper's machine is an H100, ours is named below; its models' sizes and batches are not stated. "
            f"What has no row here is {NOT_YET}.")
    return Section("Paper / ours", (note, Table(("what", "paper", "ours", "difference"), rows, 4), *notes))


def compare(calls: list[Call], out: Path) -> list[tuple[str, ...]]:
    """(what, the paper's number, ours, the reasons why they differ, separated by semicolons) of each."""
    whose, found = _counted(calls)
    return [*_steps(out), *_bandwidth(whose, found), *_table_two(whose, found), *_ratio(whose, found), *_machine(),
            *_pruning(out)]


def share_reasons(rows: list[tuple[str, ...]]) -> tuple[list[tuple[str, ...]], list[str]]:
    """The rows with a letter for each reason that several have, and a paragraph that explains the letters, if there are any."""
    counted = Counter(reason for row in rows for reason in row[-1].split("; ") if reason)
    letters = dict(zip((reason for reason, count in counted.items() if count > 1), ascii_lowercase, strict=False))

    def shorten(reasons: str) -> str:
        own = "; ".join(reason for reason in reasons.split("; ") if reason not in letters)
        shared = ", ".join(letters[reason] for reason in reasons.split("; ") if reason in letters)
        return f"{own} ({shared})".strip() if shared else own

    explained = " ".join(f"**({letter})** {reason}." for reason, letter in letters.items())
    return [(*row[:-1], shorten(row[-1])) for row in rows], [explained] if letters else []


def _steps(out: Path) -> list[tuple[str, ...]]:
    shares = steps.latest(out)

    def most(*kinds: str, workload: str = "") -> tuple[str, str]:
        """The largest share of a step, and why it is not the paper's."""
        found = {name: sum(values[kind] for kind in kinds) for name, values in shares.items() if name.startswith(workload)}
        name = max(found, key=found.get, default=None)
        if name is None:
            return NOT_YET, ""
        ours, why = f"{found[name]:.0f} % ({name})", "sizes, batches and versions differ; the paper states none"
        idle = shares[name]["idle"]
        if idle > steps.WAITS:
            ours += f"; {100 * found[name] / (100 - idle):.0f} % of the time in which the GPU is busy"
            why = (f"our GPU is idle for {idle:.0f} % of that step, and the paper does not say whether its shares are of the "
                   f"step or of busy time; {why}")
        return ours, why

    return [
        ("GEMM, most of any model's time", "60 % (text), 62 % (section V-B: hybrid)", *most("gemm")),
        ("GEMM in GraphMamba", "14 %", *most("gemm", workload="graphmamba")),
        ("SSM kernels, most of any model's time", "20 %", *most("ssm")),
        ("element-wise and normalisation, most of any model's time", "30 %", *most("elementwise", "reduce", "norm")),
        ("hybrid: layers of attention, MLP and Mamba-2", "7.1 %, 50 %, 43 %", "7.1 %, 50 %, 42.9 %",
         "by construction: the workload hybrid has the paper's pattern"),
    ]


def _counted(calls: list[Call]) -> tuple[str, dict[str, Call]]:
    """Whose kernels stand beside the paper's, and {mode: call}: upstream's, which the paper's models run, without what it
    leaves to torch; the baseline's where upstream's were not counted in both modes.
    """
    theirs = {call.row["mode"]: replace(call, kernels=tuple(k for k in call.kernels if is_of_operator(k["kernel"])))
              for call in calls if call.row["variant"] == _UPSTREAM}
    if theirs.keys() >= DIRECTIONS.keys():
        return _UPSTREAM, {mode: theirs[mode] for mode in DIRECTIONS}
    return "the baseline", kernels.baseline(calls)


def _others(whose: str) -> str:
    """Why numbers may differ, by whose kernels were counted."""
    if whose == _UPSTREAM:
        return "without what upstream leaves to torch; the paper does not state upstream's version"
    return "other kernels than upstream's"


def _bandwidth(whose: str, found: dict[str, Call]) -> list[tuple[str, ...]]:
    what = "bandwidth utilisation of the SSM kernels, on average"
    if not found:
        return [(what, "57.5 %", NOT_YET, "")]
    ours, there = [], []
    for mode, call in found.items():
        peak, of_peak = bandwidth.main_peak(call)
        ours.append(f"{DIRECTIONS[mode]} U {of_peak.U:.1f} %, W {of_peak.W:.1f} %")
        used = (definitions.percent_of_peak(kernel["dram_bytes"], kernel["ncu_us"], _H100.hbm_gbps.value)
                for kernel in call.kernels)
        there.append(f"{mean(min(100, one) for one in used):.0f} %")
    why = (f"the paper does not say whether its mean weighs time (W) or not (U); {_others(whose)}; another GPU: at as many "
           f"bytes a second, but no kernel beyond an H100's peak, U would be {' and '.join(there)} of that")
    return [(what, "57.5 %", f"{whose}, of {peak}: {'; '.join(ours)}", why)]


def _table_two(whose: str, calls: dict[str, Call]) -> list[tuple[str, ...]]:
    rows = []
    for mode, expected in TABLE_TWO.items():
        call = calls.get(mode)
        swept = {threshold: classes.compute_shares(call.kernels, threshold, recomputed=mode == "fwd")
                 for threshold in classes.THRESHOLDS} if call else {}
        found = swept.get(classes.THRESHOLD)
        like = [f"{100 * threshold:g} %" for threshold, shares in swept.items()
                if all(shares[kind][0] == count for kind, (count, _) in expected.items())]
        for kind, (count, share) in expected.items():
            ours = NOT_YET if not found else f"{found[kind][0]}: {found[kind][1]:.2f} % ({whose})"
            modelled = call and any(classes.work(kernel).source != "counters" for kernel in call.kernels)
            why = "" if not found else f"threshold {100 * classes.THRESHOLD:g} %, the paper states none; {_others(whose)}"
            if modelled:
                why += "; of kernels that ncu did not count, vector FLOPs by the cost model, a lower bound"
            if like:
                why += f"; at {' or '.join(like)} the counts are the paper's"
            elif found and found[kind][0] != count:
                why += f"; here {', '.join(_of_class(call, kind, recomputed=mode == 'fwd')) or 'none'}"
            rows.append((f"Table II, {DIRECTIONS[mode]}, {kind}: kernels and their time", f"{count}: {share:.2f} %", ours, why))
    return rows


def _of_class(call: Call, kind: str, recomputed: bool) -> list[str]:
    """Names of a call's kernels of one class, each with its tensor over its vector FLOPs where it has both."""
    kept = [kernel for kernel in call.kernels if recomputed or classes.name_stage(kernel) not in classes.RECOMPUTED]
    done = {shorten(kernel["kernel"]): classes.work(kernel) for kernel in kept}
    return [name if not (work.tensor and work.ratio) else f"{name} ({work.ratio:.0f} : 1)" for name, work in done.items()
            if work.uses(classes.THRESHOLD) == kind]


def _ratio(whose: str, calls: dict[str, Call]) -> list[tuple[str, ...]]:
    done = [(classes.work(kernel), kernel) for call in calls.values() for kernel in call.kernels]
    mixed = [(work, kernel) for work, kernel in done if work.tensor and work.ratio is not None]
    what = f"kernels of both below a tensor-to-vector ratio of {kernels.FMA_RATIO}"
    theirs = 'almost all ("almost entirely dominated by vector compute")'
    if not mixed:
        return [(what, theirs, NOT_YET, "")]
    ratios = [work.ratio for work, _ in mixed]
    ours = f"{whose}: {_below(ratios)} of {len(ratios)}; the lowest {min(ratios):.0f}"
    if not any(work.source == "counters" for work, _ in mixed):
        return [(what, theirs, ours, "ours is the formula's arithmetic; what is executed is more, and counted so: " + NOT_YET)]
    why = ("the cause is not known: the paper does not say what it counts as vector FLOPs. Ours are the FP32 additions and "
           "multiplications that ran, a fused one as two; no exponentials, conversions, comparisons or integers. ")
    if all("exps" in kernel for _, kernel in mixed):
        more = _below(work.tensor / (work.vector + kernel["exps"]) for work, kernel in mixed)
        why += (f"With what the special function units did added, exponentials among it, {more} of {len(mixed)} would be "
                "below; the rest was not counted. ")
    return [(what, theirs, ours, f"{why}Also, {_others(whose)}")]


def _below(ratios: Iterable[float]) -> int:
    return sum(ratio < kernels.FMA_RATIO for ratio in ratios)


def _machine() -> list[tuple[str, ...]]:
    h100 = GPUS["h100"]
    return [
        ("H100: tensor cores to vector units, FP16", "16",
         f"{h100.bf16_tflops.value / h100.fp32_tflops.value:.1f} by data sheet",
         "16 fused multiply-adds a clock for one, and our line; the sheet's tensor rate is at a lower clock"),
        ("H100: FP8 tensor to exponential throughput", "512", f"{_FP8_PER_CLOCK / 16:.0f} a clock", "given, not measured"),
        ("H100: SMs, memory, L2", "132, 3350 GB/s, 50 MB",
         f"{h100.sms.value:.0f}, {h100.hbm_gbps.value:.0f} GB/s, {h100.l2_mb.value:.0f} MB", "data sheet; none was at hand"),
        ("H100: L1 of an SM, memory", "256 KB, 80 GB", "256 KB, 80 GB", "data sheet"),
        ("H100: bf16 and FP32 tensor", "989, 494 TFLOP/s", f"{h100.bf16_tflops.value:.0f} TFLOP/s",
         "data sheet; 494 is TF32's, FP32 has no tensor cores"),
        ("H100: FP32 vector", "133.8 TFLOP/s", f"{h100.fp32_tflops.value} TFLOP/s",
         "a slip: 133.8 is the FP16 rate without tensor cores"),
    ]


def _pruning(out: Path) -> list[tuple[str, ...]]:
    why = "the score by which it prunes is not in the abstract"
    measured = {row["seqlen"] for row in components.read_latest(out)}
    blocks = (f"the operator, and the components of blocks, {_range(measured)}: section \"Scaling with the sequence length\""
              if measured else f"the operator; the components of blocks: {NOT_YET}")
    operator = {row["seqlen"] for row in table.read_latest(out) if row["shape"].startswith("sweep-")}
    return [("[2] speed-up by pruning states", "1.14 times", NOT_YET, why), ("[2] memory saved by it", "11.50 %", NOT_YET, why),
            ("[2] sequence lengths", "64 to 16384", _range(operator) or NOT_YET, blocks)]


def _range(lengths: set[int]) -> str:
    return f"{min(lengths)} to {max(lengths)}" if lengths else ""
