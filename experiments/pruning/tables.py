"""Tables of what pruning costs in loss and gains in time and memory, in Markdown, each from committed rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from operator import itemgetter
from statistics import mean
from typing import Any, NamedTuple

from .. import record
from ..result_tables import join_words
from ..table import render_lines, write_head
from .losses import WHOLE
from .speed import identify_call

PAPER_SPEEDUP, PAPER_SAVED = 1.14, 0.115  # of arXiv:2511.22849
_SPEED_HEAD = write_head("what | mode | tokens | removed | µs | faster | MiB | less memory", "what", "mode", "removed")
_LOSS_HEAD = write_head(
    "model | removed | by | seeds | whole | pruned | with bridge | fine-tuned | whole, trained on | less than random",
    "model", "removed", "by")
_SAYS = {"mamba1": "block of Mamba-1", "mamba2": "block of Mamba-2", "model": "model", "step": "training step"}


class Gain(NamedTuple):
    """What a row has over the whole's: how many times as fast it is, and the share of the memory that it saves."""

    row: dict
    faster: float
    saved: float

    @property
    def what(self) -> str:
        return f"{_SAYS[self.row['part']]} {self.row['preset'] or ''}".strip()

    @property
    def share(self) -> str:
        return _describe_ratio(self.row["ratio"], self.row["kind"])


def list_gains(rows: list[dict]) -> list[Gain]:
    """Of each pruned row whose whole was measured."""
    wholes = {identify_call(row): row for row in rows if not row["ratio"]}
    pruned = sorted((row for row in rows if row["ratio"]),
                    key=lambda row: (row["gpu"], row["part"], row["mode"], row["kind"], row["seqlen"], str(identify_call(row)),
                                     row["ratio"]))
    return [Gain(row, record.get_us(whole) / record.get_us(row), 1 - _get_mib(row) / _get_mib(whole))
            for row in pruned if (whole := wholes.get(identify_call(row)))]


def tabulate_speed(rows: list[dict]) -> str:
    """rows: of `speed.read_latest`. Memory: what a call holds, weights and all."""
    lines, reached, gains = [], Counter(), list_gains(rows)
    for gain in gains:
        row = gain.row
        lines.append([f"{gain.what}, {row['gpu'].removeprefix('NVIDIA ')}", row["mode"], f"{row['seqlen']:,}", gain.share,
                      f"{record.get_us(row):,.0f}", f"{gain.faster:.2f}", f"{_get_mib(row):,.0f}", f"{gain.saved:.1%}"])
        if gain.faster >= PAPER_SPEEDUP and gain.saved >= PAPER_SAVED:
            reached[row["kind"]] += 1
    if not lines:
        return "No rows yet: no GPU has run `make prune-speed` for this table.\n"
    paper = f"{PAPER_SPEEDUP} times as fast with {PAPER_SAVED:.1%} less memory"
    said = [f"The paper says {paper}."]
    for kind, of in sorted(record.group_by(gains, lambda gain: gain.row["kind"]).items()):
        best = max(of, key=lambda gain: gain.faster)
        said.append(f"Of {len(of)} lines with {kind} removed, {reached[kind]} reach both; without {best.share} it is at most "
                    f"{best.faster:.2f} times as fast, with {best.saved:.1%} less memory.")
    return f"{_SPEED_HEAD}{render_lines(lines)}\n{' '.join(said)}\n"


def tabulate_losses(rows: list[dict]) -> str:
    """rows: of `losses.read_latest`. Means over the seeds that there are; of each score, whether it beats a random choice.

    Seeds draw the text, too, so losses are compared within a seed, and what is compared between seeds are these gains.
    """
    lines, said = [], []
    pruned = [row for row in rows if row["score"] != WHOLE]
    wholes = {(_describe_model(row), row["run"]["seed"]): row["loss"] for row in rows if row["score"] == WHOLE}
    of_models = record.group_by(pruned, lambda row: (*_describe_model(row), row["ratio"]))
    for (model, kind, ratio), group in sorted(of_models.items()):
        group = list({(row["score"], row["run"]["seed"]): row for row in group}.values())  # of several GPUs, the last
        scores = record.group_by(group, lambda row: row["score"])
        removed = _describe_ratio(ratio, kind)
        for score, of in sorted(scores.items()):
            losses = [[row[name] for row in of] for name in ("loss_whole", "loss_pruned", "loss_bridged", "loss")]
            losses.append([wholes.get(((model, kind), row["run"]["seed"])) for row in of])  # as long as the pruned
            gains = [] if score == "random" else _list_gains(of, scores.get("random", []), _get_loss)
            lines.append([model, removed, score, len(of), *map(_write_mean, losses), _write_range(gains)])
        said += _compare_with_random(f"{model}, {removed}", scores)
    if not lines:
        return "No rows yet: no GPU has run `make prune` for this table.\n"
    return _LOSS_HEAD + render_lines(lines) + "".join(f"\n{sentence}\n" for sentence in said)


def _compare_with_random(what: str, scores: dict[str, list[dict]]) -> list[str]:
    """A sentence on the scores that share two seeds or more with a random choice, just pruned and at the end."""
    told = []
    for when, get in (("Just pruned", itemgetter("loss_pruned")), ("At the end", _get_loss)):
        gains = {score: found for score, of in sorted(scores.items()) if score != "random"
                 and len(found := _list_gains(of, scores.get("random", []), get)) > 1}
        better, others = ([score for score, found in gains.items() if (mean(found) > max(found) - min(found)) == beats]
                          for beats in (True, False))
        if gains:
            rest = f"; not {join_words(others)}" if better and others else ""
            told.append(f"{when}: {join_words(better or ['none'])}{rest}.")
    rule = "scores whose mean gain over a random choice is larger than its spread between seeds."
    return [f"{what}: {rule} {' '.join(told)}"] if told else []


def _list_gains(rows: list[dict], random: list[dict], get: Callable[[dict], float]) -> list[float]:
    """How much lower the loss is than that of a random choice, by seed."""
    of_random = {row["run"]["seed"]: get(row) for row in random}
    return [of_random[seed] - get(row) for row in rows if (seed := row["run"]["seed"]) in of_random]


def _write_range(gains: list[float]) -> str:
    return f"{mean(gains):.4f} ({min(gains):.4f} to {max(gains):.4f})" if len(gains) > 1 else ""


def _describe_model(row: dict) -> tuple[str, str]:
    run = row["run"]
    steps = f"{run['steps']} steps, {row['finetune']} of fine-tuning" if row["finetune"] else f"{run['steps']} steps"
    return f"{run['workload']} {run['preset']} ({run['mixer']}), {steps}", row["kind"]


def _describe_ratio(ratio: float, kind: str) -> str:
    return f"{ratio:.1%} of the {kind}"


def _get_mib(row: dict) -> float:
    return row["peak_mib"] + (0 if row["part"] == "step" else row["weights_mib"])


def _get_loss(row: dict) -> float:
    return next(row[name] for name in ("loss", "loss_bridged", "loss_pruned") if row[name] is not None)


def _write_mean(values: list[Any]) -> str:
    return "" if None in values else f"{mean(values):.3f}"
