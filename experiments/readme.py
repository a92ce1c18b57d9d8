"""What README.md and docs show of committed rows: written between markers; figures are files in docs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

import torch
from triton import knobs

from ssd.registry import is_peer

from . import (
    ablate,
    auto_gains,
    block,
    choose,
    context,
    context_model,
    documents,
    figure,
    patches,
    record,
    result_tables,
    speedup_figure,
    step_figure,
    step_options,
    sweep,
    table,
    terminal_page,
    training_tables,
)
from .decode import read_comparisons as read_decoding
from .pruning import losses as pruning_losses
from .pruning import speed as pruning_speed
from .pruning import tables as pruning_tables
from .result_tables import MODES
from .shapes import DIRECTIONS

ROOT = Path(__file__).parent.parent
SPEEDUPS_FIGURE = "docs/speedups.svg"
FIGURE = "docs/results.svg"
STEPS_FIGURE = "docs/workloads.svg"
TERMINAL = "docs/terminal.md"
_MEMORY = ("8b-b1", "8b-b4")  # the shapes whose memory is shown
Rows = list[dict]


@dataclass(frozen=True)
class Shown:
    """Rows of what documents show.

    Attributes:
        bench: named shapes in bf16, each variant as it comes, at its faster chunk size.
        memory: of the bench, in bf16 at every option and chunk size.
        blocks: the parts of a block that have a rival.
        decoding: generation in a CUDA graph, beside a rival.
        ablation: sorted by setting.
        steps: of the sweep, each variant as it comes.
        step_changes: steps with one of their settings changed.
        trainings: every one.
        checks: set-ups, and runs of all tests, without a GPU.
        choices: what "auto" chooses by, and was measured beside.
        contexts: sequences over several GPUs.
        documents: packed ones with states, and states at positions.
        patches: layers of transformers' models.
        pruned, pruned_losses: times, and losses, of pruned models.
    """

    bench: Rows = field(default_factory=list)
    memory: Rows = field(default_factory=list)
    blocks: Rows = field(default_factory=list)
    decoding: Rows = field(default_factory=list)
    ablation: Rows = field(default_factory=list)
    steps: Rows = field(default_factory=list)
    step_changes: Rows = field(default_factory=list)
    trainings: Rows = field(default_factory=list)
    checks: Rows = field(default_factory=list)
    choices: Rows = field(default_factory=list)
    contexts: Rows = field(default_factory=list)
    documents: Rows = field(default_factory=list)
    patches: Rows = field(default_factory=list)
    pruned: Rows = field(default_factory=list)
    pruned_losses: Rows = field(default_factory=list)

    @staticmethod
    def read(out: Path = record.RESULTS) -> Shown:
        """From every row of a GPU that there is, but for `checks`.

        Raises:
            ValueError: a line that is no row.
        """
        rows = record.read_gpus(out)
        bench = [row for row in table.read_latest(rows, compared=True, dtype="bf16")
                 if not row["shape"].startswith("sweep-") and record.has_default_options(row)]
        ablation = [row for row in ablate.read_latest(rows) if row["mode"] in DIRECTIONS]
        steps = [row for row in sweep.read_latest(rows) if record.has_default_options(row)]
        return Shown(
            table.compare_with_least(bench, [row for row in bench if is_peer(row["variant"])]),
            [row for row in table.read_latest(rows, all_chunks=True)  # but "auto" told to keep nothing, as it does anyway
             if row["dtype"] == "bf16" and (row["variant"] != "auto" or record.options(row)["save_states"])],
            [row for row in block.read_latest(rows) if row.get("against")],
            read_decoding(rows),
            sorted(ablation, key=itemgetter("gpu", "shape", "mode", "variant")), sorted(steps, key=itemgetter("gpu")),
            record.read(rows, bench="step_ablate"), record.read(rows, bench="train"),
            [*record.read(out, bench="setup", gpu=None),
             *record.read(out, bench="tests", gpu=None, only=None, shard=None, failed=0)],
            [row for row in rows if row["bench"] in choose.BENCHES], record.read(rows, bench="context"),
            record.read(rows, bench="documents"), record.read(rows, bench="patches"),
            pruning_speed.read_latest(rows), pruning_losses.read_latest(rows))


def write(shown: Shown, root: Path = ROOT, check: bool = False) -> bool:
    """Write every table and figure of these rows; True if nothing had to change. check: change nothing.

    Raises:
        ValueError: a page without its markers.
    """
    sections = list_sections(shown)
    before = {page: (root / page).read_text() for page, _ in sections}
    after = dict(before)
    for (page, section), text in sections.items():
        after[page] = _put(section, text, after[page], page)
    current = before == after
    if not check:
        for page, text in after.items():
            (root / page).write_text(text)
    every_mode = [row for row in shown.bench if row["mode"] in MODES]
    for path, drawing, rows in ((SPEEDUPS_FIGURE, speedup_figure, every_mode), (FIGURE, figure, every_mode),
                                (STEPS_FIGURE, step_figure, shown.steps)):
        points = drawing.points(rows)
        same = not any(points.values()) or figure.read_fingerprint(root / path) == figure.compute_fingerprint(points)
        if not check and not same:
            drawing.draw(rows, root / path)
        current &= same
    return _write_terminal(root, check) and current


def list_sections(shown: Shown) -> dict[tuple[str, str], str]:
    """{(page, section): what is written there}"""
    timed = [row for row in shown.bench if row["mode"] in MODES]
    picture = f"![Speed-ups over mamba_ssm, a pair of bars for each model's layer]({SPEEDUPS_FIGURE})\n\n"
    return {
        ("README.md", "speedups"): picture + result_tables.tabulate_speedups(timed, shown.steps),
        ("README.md", "costs"): result_tables.tabulate_costs(shown.memory),
        ("README.md", "setup"): result_tables.describe_setup(shown.checks),
        ("docs/results.md", "models"): result_tables.tabulate_models(timed),
        ("docs/results.md", "results"): result_tables.tabulate_results(timed, Path(FIGURE).name),
        ("docs/results.md", "memory"): result_tables.tabulate_memory([row for row in shown.memory if row["shape"] in _MEMORY]),
        ("docs/results.md", "auto"): auto_gains.tabulate(shown.choices),
        ("docs/results.md", "choices"): choose.tabulate_choices(choose.make_tables(shown.choices)),
        ("docs/results.md", "blocks"): result_tables.tabulate_blocks(shown.blocks),
        ("docs/results.md", "decoding"): result_tables.tabulate_decoding(shown.decoding),
        ("docs/results.md", "workloads"): training_tables.tabulate_steps(shown.steps, Path(STEPS_FIGURE).name),
        ("docs/workloads.md", "gains"): training_tables.tabulate_gains(shown.steps),
        ("docs/workloads.md", "gpus"): training_tables.tabulate_several_gpus(shown.trainings),
        ("docs/workloads.md", "seeds"): training_tables.tabulate_several_seeds(shown.trainings),
        ("docs/ablation.md", "ablation"): result_tables.tabulate_ablation(shown.ablation),
        ("docs/ablation.md", "steps"): step_options.tabulate(shown.step_changes),
        ("docs/context-parallel.md", "exchanges"): context.tabulate_exchanges(),
        ("docs/context-parallel.md", "times"): context.tabulate_times(shown.contexts),
        ("docs/context-parallel.md", "many"): context_model.tabulate(shown.contexts),
        ("docs/drop-in.md", "documents"): documents.tabulate(shown.documents),
        ("docs/drop-in.md", "patches"): patches.tabulate(shown.patches),
        ("docs/drop-in.md", "libraries"): result_tables.tabulate_libraries(shown.bench, shown.blocks),
        ("docs/pruning.md", "pruned"): pruning_tables.tabulate_speed(shown.pruned),
        ("docs/pruning.md", "losses"): pruning_tables.tabulate_losses(shown.pruned_losses),
        (TERMINAL, "terminal-gpu"): terminal_page.print_recorded_run(shown.bench),
    }


def _write_terminal(root: Path, check: bool) -> bool:
    """What is printed without a GPU is left as it is where there is one."""
    if torch.cuda.is_available() or not knobs.runtime.interpret:
        return True
    printed = terminal_page.print_without_gpu()
    if terminal_page.mask_errors(printed) in terminal_page.mask_errors((root / TERMINAL).read_text()):
        return True
    before = (root / TERMINAL).read_text()
    after = _put("terminal-cpu", printed, before, TERMINAL)
    if not check:
        (root / TERMINAL).write_text(after)
    return before == after


def _put(section: str, written: str, text: str, page: str) -> str:
    """The text of a page with this between the section's markers."""
    begin, end = f"<!-- {section}: written by `make readme` -->", f"<!-- end of {section} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{page}: expected the lines {begin!r} and {end!r} once each")
    return re.sub(f"{re.escape(begin)}.*{re.escape(end)}", lambda _: f"{begin}\n\n{written}\n{end}", text, flags=re.S)
