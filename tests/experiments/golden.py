"""Losses of the tiny presets, as they were: python -m tests.experiments.golden writes them anew, on a CPU."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from experiments.train import train
from experiments.training_run import make_run
from experiments.workloads import get_workload, workload_names
from tests.experiments.small import read_log

GOLDEN = Path(__file__).with_suffix(".json")
STEPS = 12
CASES = [(name, mixer) for name in workload_names() for mixer in get_workload(name).mixers]


def train_small(workload: str, mixer: str, variant: str = "torch", steps: int = STEPS, **settings) -> list[float]:
    """Losses of every step; settings: of the run."""
    run = make_run(workload, mixer=mixer, variant=variant, steps=steps, save_every=0, **settings)
    with TemporaryDirectory() as folder:
        out = Path(folder)
        train(run, out, Console(quiet=True), rows=out)
        return read_log(out)


def main() -> None:
    found = {f"{workload} {mixer}": train_small(workload, mixer) for workload, mixer in CASES}
    lines = (f'  "{name}": {json.dumps([round(loss, 5) for loss in losses])}' for name, losses in found.items())
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
