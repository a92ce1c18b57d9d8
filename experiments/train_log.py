"""What a training run says of each step: a line of log.jsonl, progress, and TensorBoard where it is installed."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ssd.files import flush

from .files import hold_folder, replace_file
from .terminal import make_timer


class TrainLog:
    """Use as a context manager, whose process has the run's folder for itself.

    Args:
        folder: of the run; it is made with the first step.
        steps: of the whole run.
        unit: what speed is counted in.
        done: steps of it that an earlier process took; what it logged after them is dropped, for they are taken again.
        writes: whether this process writes files; of several one does.

    Attributes:
        losses: of every step so far.

    Raises:
        FileExistsError: by the first step at the latest: another process trains in the folder, or has.
        ValueError: the log of the steps done is damaged.
    """

    def __init__(self, folder: Path, steps: int, unit: str, done: int, console: Console, writes: bool = True):
        self.folder, self.path, self.unit = folder, folder / "log.jsonl", unit
        self._writes, self._held = writes, None
        if writes and done:
            self._hold()
        self.losses = self._read_losses(done) if done else []
        self._new_board = _find_tensorboard() if writes else None
        self._board = None
        self._console, self._is_due, self._steps = console, make_timer(), steps
        self._progress = Progress(
            BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"), console=console)
        self._task = self._progress.add_task("", total=steps, completed=done)

    def __enter__(self) -> TrainLog:
        self._progress.start()
        return self

    def __exit__(self, *_) -> None:
        self._progress.stop()
        if self._board:
            self._board.close()
        if self._held is not None:
            os.close(self._held)

    def step(self, step: int, values: dict[str, float]) -> None:
        """values: loss, <unit>_per_s, peak_mib, and what else there is to say."""
        self.losses.append(values["loss"])
        if not self._writes:
            return
        if self._held is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._hold()
            if self.path.exists():
                raise FileExistsError(
                    f"--out: got {self.folder}, where another run has begun meanwhile, expected another folder")
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **values}, allow_nan=False) + "\n")
        speed = f"{values[f'{self.unit}_per_s']:,.0f} {self.unit}/s"
        said = f"loss {values['loss']:.4f}  {speed}  {values['peak_mib']:,.0f} MiB"
        self._progress.update(self._task, completed=step, description=said)
        if not self._console.is_terminal and self._is_due():
            self._console.print(f"step {step} of {self._steps}: {said}", markup=False, highlight=False)
        if self._new_board:
            self._board = self._board or self._new_board(self.folder / "tensorboard", purge_step=step)
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def _hold(self) -> None:
        try:
            self._held = hold_folder(self.folder)
        except BlockingIOError as error:
            raise FileExistsError(f"--out: got {self.folder}, where another process trains, expected another folder") from error

    def flush(self) -> None:
        """What was logged, through to the disk: a checkpoint is of no use without."""
        if self._writes and self.path.exists():
            flush(self.path)

    def _read_losses(self, done: int) -> list[float]:
        """Losses of the steps done; the file is cut after them, at once."""
        lines = self.path.read_text().splitlines()[:done] if self.path.is_file() else []
        try:
            entries = [json.loads(line) for line in lines]
            losses = [entry["loss"] for entry in entries]
            whole = [entry["step"] for entry in entries] == list(range(1, done + 1))
        except (ValueError, KeyError, TypeError):
            whole = False
        if not whole:
            raise ValueError(f"{self.path}: expected a line for each of the {done} steps of the checkpoint; a run whose log is "
                             "damaged cannot go on: start it anew with another --out")
        if self._writes:
            with replace_file(self.path) as part:
                part.write_text("".join(line + "\n" for line in lines))
        return losses


def _find_tensorboard() -> type | None:
    """What writes its files; None where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter
