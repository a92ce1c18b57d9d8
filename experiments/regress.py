"""Two trees of this repository side by side on one GPU: has a change cost time?

Each tree runs in a process of its own, which times what it is told to and waits; the two are told in turn, so that a change of
clocks meets both alike. What times them is this tree's for both.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from . import flags, record
from .arguments import require_gpu, split_names, split_shapes
from .flags import VARIANTS
from .shapes import DIRECTIONS
from .terminal import make_console, refuse, track

_HERE = Path(__file__).parent
_TIMES = ("p50_us", "graph_p50_us", "host_us")
_MODES = (*DIRECTIONS, "fwd_bwd")


class _Tree:
    """A process that times the operator of one tree."""

    def __init__(self, folder: Path):
        self.folder = folder
        run = f"import runpy; runpy.run_path({str(_HERE / 'timed_tree.py')!r}, run_name='__main__')"  # imports look in `folder`
        self.process = subprocess.Popen([sys.executable, "-c", run], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True)

    def ask(self, **question) -> dict:
        """The answer of `timed_tree` to one line.

        Raises:
            RuntimeError: the process ended; what it said is on stderr.
        """
        print(json.dumps(question), file=self.process.stdin, flush=True)
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"the process that times {self.folder} ended with status {self.process.wait()}")
        return json.loads(line)


def regress(
    base: Annotated[str, typer.Option(help="What to compare with: a commit, or the folder of another tree.")] = "HEAD~1",
    variant: Annotated[str, typer.Option(help="Variants to time, a comma between.")] = "persistent",
    shape: Annotated[str, typer.Option(help="Shapes, as of bench.")] = "8b-b4,2.7b-b4,130m-b8",
    mode: Annotated[str, typer.Option(help=f"Modes, of {', '.join(_MODES)}.")] = "fwd,bwd",
    dtype: flags.Dtype = "bf16",
    chunk_size: Annotated[int, typer.Option(help="One of 16 to 256.")] = 128,
    rounds: Annotated[int, typer.Option(min=2, help="Times that each tree is asked.")] = 5,
    repeats: Annotated[int, typer.Option(min=2, help="Timed calls in each round.")] = 20,
    out: flags.Out = record.RESULTS,
) -> None:
    """Time the operator of this tree and of another in turn: eager, in a CUDA graph, and on the host; a row for each call."""
    variants, modes = split_names("--variant", variant, VARIANTS), split_names("--mode", mode, _MODES)
    shapes, console = split_shapes(shape), make_console()
    require_gpu("regress")
    settings = [(s, m, v) for s in shapes for m in modes for v in variants]
    with _tree_of(base) as (folder, name):
        trees = [_Tree(folder), _Tree(_HERE.parent)]
        for s, m, v in track(settings, console, lambda one: f"{one[0].name} {one[1]} {one[2]}"):
            times = _time(trees, rounds, shape=s.name, mode=m, variant=v, dtype=dtype, chunk_size=chunk_size, repeats=repeats)
            row = {"bench": "regress", "variant": v, "mode": m, "shape": s.name, **s.sizes, "dtype": dtype,
                   "chunk_size": chunk_size, **dict(zip(_TIMES, times[1], strict=True)), "base": name,
                   **{f"base_{key}": value for key, value in zip(_TIMES, times[0], strict=True)}, "rounds": rounds}
            record.add([row], out)
            said = ", ".join(f"{key} {new:.1f} for {old:.1f} ({new / old:.3f})"
                             for key, old, new in zip(("eager", "graph", "host"), *times, strict=True))
            console.print(f"{s.name} {m} {v}: {said} us", highlight=False)


def _time(trees: list[_Tree], rounds: int, **call) -> list[list[float]]:
    """Medians over the rounds of `_TIMES`, a list for each tree."""
    for tree in trees:
        tree.ask(**call)
    rows = [[tree.ask() for tree in trees] for _ in range(rounds)]
    return [[median(answers[n][key] for answers in rows) for key in _TIMES] for n in range(len(trees))]


@contextmanager
def _tree_of(base: str) -> Iterator[tuple[Path, str]]:
    """The folder of a tree and what to call it: a commit is checked out for as long as it is needed."""
    if Path(base).is_dir():
        yield Path(base).resolve(), Path(base).resolve().name
        return
    git = ["git", "-C", str(_HERE)]
    found = subprocess.run([*git, "rev-parse", "--verify", f"{base}^{{commit}}"], capture_output=True, text=True)
    if found.returncode:
        refuse(f"--base: got {base!r}, expected a commit of this repository or a folder")
    with TemporaryDirectory() as folder:
        subprocess.run([*git, "worktree", "add", "--detach", "--quiet", folder, found.stdout.strip()], check=True)
        try:
            yield Path(folder), found.stdout.strip()
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", folder], check=True)
