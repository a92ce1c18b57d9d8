"""Loss against ratio: a trained workload without its least active states or heads, before and after a bridge and fine-tuning.

A row for each ratio and score, and one of ratio 0: the whole model, trained on for as many steps as the pruned ones, which is
what they compare with. What has its row is not run again.
"""

import copy
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from ssd import pruning

from .. import checkpoints, record
from ..parallel import Team, make_single
from ..train import check_same_run, train
from ..training_run import Run
from ..training_step import build_model, make_batches
from ..workloads import Workload, get_workload

WHOLE = "none"  # the score of the row of ratio 0
_SLOWER = 0.1  # the highest learning rate of fine-tuning, of training's


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        run: how the whole model is trained, or was.
        folder: of the run; it is trained there first, or further, unless it has taken all of its steps. What is pruned and
            fine-tuned gets folders of its own in `pruned` beneath, so that no checkpoint of the run is overwritten.
        kind: "states" or "heads".
        ratios: of what is removed.
        scores: by which it is chosen, of `ssd.pruning.SCORES`.
        finetune: steps, with a tenth of the run's learning rate; 0 for none.
        calibration, evaluation: micro-batches that scores and bridges are taken from, and losses. Neither is trained on where
            data have no end.
        bridge: fit one.
        out: of the rows; unless given the results with a GPU, `folder` without.
        again: run what has its row, too.
    """

    run: Run
    folder: Path
    kind: str = "states"
    ratios: tuple[float, ...] = (0.5,)
    scores: tuple[str, ...] = ("activity",)
    finetune: int = 100
    calibration: int = 8
    evaluation: int = 8
    bridge: bool = True
    out: Path | None = None
    again: bool = False


def run(plan: Plan, console: Console) -> list[dict]:
    """Runs the plan and returns its rows, those that it found included.

    Raises:
        ValueError: a ratio, or a workload without what is to be pruned; before anything is trained.
        Interrupted, Stopped, OSError: as `train`.
    """
    workload, team = get_workload(plan.run.workload), make_single()
    _check(plan, workload)
    plan = replace(plan, out=plan.out or (record.RESULTS if team.device.type == "cuda" else plan.folder))
    whole = _train_whole(plan, workload, team, console)
    model = build_model(plan.run, workload, team)[0]
    pruning.load(model, whole)
    batches = _draw(plan, workload, team)
    calibration, held = batches[: plan.calibration], batches[plan.calibration :]
    loss_whole = _evaluate(plan.run, workload, model, held)
    scores = _score(plan, workload, model, calibration)
    rows = []
    for ratio, name in [(0.0, WHOLE), *((ratio, name) for ratio in plan.ratios for name in plan.scores)]:
        if (row := _find_row(plan, ratio, name)) and not plan.again:
            console.print(f"{plan.kind} {ratio} by {name}: done before", style="dim", markup=False)
        else:
            folder = _choose_folder(plan, ratio, name)
            pruned = copy.deepcopy(model.to(team.device))
            found = _prune(plan, workload, model, pruned, ratio, scores.get(name), calibration, held)
            if name != WHOLE:
                _save(plan, pruned, folder, ratio, name)
            found["parameters"] = sum(t.numel() for t in pruned.parameters())
            del pruned
            model.cpu()  # memory is that of fine-tuning alone
            found |= _fine_tune(plan, workload, team, folder, held, console)
            (row,) = record.add([{"bench": "prune", **plan.run.identity(), **_identify(plan, ratio, name),
                                  "loss_whole": loss_whole, **found}], plan.out)
        rows.append(row)
    return rows


def _check(plan: Plan, workload: Workload) -> None:
    """Refuses what cannot be pruned, by a model without weights."""
    if not plan.run.save_every:
        raise ValueError(f"--trained: got {plan.folder}, a run with --save-every 0, expected one that saves its last step")
    with torch.device("meta"):
        model = workload.build(plan.run.sizes, plan.run.variant, False)
    try:
        blocks = pruning.find_blocks(model, plan.kind)
    except ValueError as reason:
        raise ValueError(f"--workload: {plan.run.workload}/{plan.run.mixer}: {reason}") from reason
    scores = {name: torch.zeros(b.ngroups, b.dstate) if plan.kind == "states" else torch.zeros(b.nheads)
              for name, b in blocks.items()}
    for ratio in plan.ratios:
        try:
            pruning.choose(blocks, scores, plan.kind, ratio)
        except ValueError as reason:
            raise ValueError(f"--{reason}") from reason


def _train_whole(plan: Plan, workload: Workload, team: Team, console: Console) -> Path:
    """The folder of the whole model's weights."""
    saves = plan.folder / "checkpoints"
    last, _ = checkpoints.latest_good(saves)
    if last is None or checkpoints.read_state(last)["step"] < plan.run.steps:
        train(plan.run, plan.folder, console, resume=last is not None, rows=plan.folder, graph=None)
        last, _ = checkpoints.latest_good(saves)
    check_same_run(plan.run, checkpoints.read_state(last), plan.folder)
    model, optimizer, _ = build_model(plan.run, workload, team)
    checkpoints.restore(last, model, optimizer)
    folder = _choose_folder(plan, 0.0, WHOLE)
    _save(plan, model, folder, 0.0, WHOLE)
    return folder


def _save(plan: Plan, model: nn.Module, folder: Path, ratio: float, score: str) -> None:
    """Save the model, unless an earlier call did, of a plan that was broken off, say."""
    if plan.again or not (folder / "config.json").exists():  # which is written last
        shutil.rmtree(folder.parent, ignore_errors=True)
        pruning.save(model, folder, {"run": asdict(plan.run)}, kind=plan.kind, ratio=ratio, score=score)


def _draw(plan: Plan, workload: Workload, team: Team) -> list[dict[str, Tensor]]:
    """Draw micro-batches that come after those of all trainings here."""
    done = max(plan.run.steps, plan.finetune)
    later = replace(plan.run, steps=done + math.ceil((plan.calibration + plan.evaluation) / plan.run.accumulate))
    with closing(make_batches(later, workload, workload.dataset(later), done, team)) as batches:
        return list(islice(batches, plan.calibration + plan.evaluation))


def _forward(run: Run, workload: Workload, model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> Iterator[float]:
    """The loss of each micro-batch, without training: no drop-out, and the same random numbers each time."""
    model.eval()
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        device = next(iter(batch.values())).device.type
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=run.dtype == "bf16"):
            yield workload.loss(model, batch).item()


def _evaluate(run: Run, workload: Workload, model: nn.Module, batches: list[dict[str, Tensor]]) -> float:
    losses = list(_forward(run, workload, model, batches))
    return sum(losses) / len(losses)


def _score(plan: Plan, workload: Workload, model: nn.Module,
           calibration: list[dict[str, Tensor]]) -> dict[str, Mapping[str, Tensor]]:
    """The scores by their names."""
    with pruning.Activity(model, plan.kind) as activity:
        list(_forward(plan.run, workload, model, calibration))
    others = {"magnitude": lambda: pruning.score_magnitude(model, plan.kind),
              "random": lambda: pruning.score_random(model, plan.kind, plan.run.seed)}
    return {name: others[name]() if name in others else activity.scores(name) for name in plan.scores}


def _prune(plan: Plan, workload: Workload, whole: nn.Module, pruned: nn.Module, ratio: float,
           scores: Mapping[str, Tensor] | None, calibration: list[dict[str, Tensor]],
           held: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Prunes, bridges, and returns the losses after each."""
    if scores is None:
        loss = _evaluate(plan.run, workload, pruned, held)
        return {"loss_pruned": loss, "loss_bridged": None, "bridged": None}
    pruning.prune(pruned, scores, plan.kind, ratio)
    loss = _evaluate(plan.run, workload, pruned, held)
    if not plan.bridge or not all(block.has("heads") for block in pruning.find_blocks(pruned).values()):
        return {"loss_pruned": loss, "loss_bridged": None, "bridged": None}
    with pruning.Bridge(whole, pruned.eval()) as bridge:
        list(_forward(plan.run, workload, whole, calibration))
    errors = bridge.apply()
    return {"loss_pruned": loss, "loss_bridged": _evaluate(plan.run, workload, pruned, held),
            "bridged": sum(after < before for before, after in errors.values())}


def _fine_tune(plan: Plan, workload: Workload, team: Team, start: Path, held: list[dict[str, Tensor]],
               console: Console) -> dict[str, Any]:
    """Trains what is in a folder, in a folder beside it; the loss then, and what a step of that took."""
    if not plan.finetune:
        return {"loss": None}
    tuned = replace(plan.run, steps=plan.finetune, warmup=plan.finetune // 10, lr=plan.run.lr * _SLOWER, start=str(start))
    out = start.with_name(f"tuned-{plan.finetune}")
    last, _ = checkpoints.latest_good(out / "checkpoints")
    if last is None or checkpoints.read_state(last)["step"] < tuned.steps:
        train(tuned, out, console, resume=last is not None, rows=out, graph=None)
        last, _ = checkpoints.latest_good(out / "checkpoints")
    rows = record.read(out, bench="train")
    if not rows:
        raise ValueError(f"{out}: its run has ended, but the row of its times is missing; remove that folder to train it again")
    row = rows[-1]
    model, optimizer, _ = build_model(tuned, workload, team)
    checkpoints.restore(last, model, optimizer)
    return {"loss": _evaluate(plan.run, workload, model, held),
            **{key: row[key] for key in ("p20_us", "p50_us", "p80_us", "unit", "units_per_s", "peak_mib", "floor")}}


def _choose_folder(plan: Plan, ratio: float, score: str) -> Path:
    name = WHOLE if score == WHOLE else f"{plan.kind}-{ratio:g}-{score}-{plan.calibration}{'' if plan.bridge else '-unbridged'}"
    return plan.folder / "pruned" / name / "model"


def _find_row(plan: Plan, ratio: float, score: str) -> dict | None:
    rows = record.read_run(plan.out, asdict(plan.run), bench="prune", gpu=record.environment()["gpu"],
                           **_identify(plan, ratio, score))
    return rows[-1] if rows else None


def _identify(plan: Plan, ratio: float, score: str) -> dict[str, Any]:
    """The keys of a row that say what was done to the run's model."""
    return {"kind": plan.kind, "ratio": ratio, "score": score, "bridge": plan.bridge, "calibration": plan.calibration,
            "evaluation": plan.evaluation, "finetune": plan.finetune}


def read_latest(out: Path | list[dict] = record.RESULTS) -> list[dict]:
    """The last row of each run, ratio, score and way."""
    keys = ("kind", "ratio", "score", "bridge", "calibration", "evaluation", "finetune")
    return record.latest(record.read(out, bench="prune"), lambda row: (
        row["gpu"], record.settings(row), *(row[key] for key in keys)))


def read_run(folder: Path) -> Run:
    """The settings of the run in a folder.

    Raises:
        FileNotFoundError, ValueError: naming the option.
    """
    path = folder / "run.json"
    if not path.is_file():
        raise FileNotFoundError(f"--trained: got {folder}, expected a folder with a run.json that make train wrote")
    try:
        return Run(**json.loads(path.read_text()))
    except (TypeError, ValueError) as reason:
        raise ValueError(f"--trained: {path}: {reason}") from reason
