"""The process that runs configurations: lines of JSON in, a line before each configuration and a line after it out.

In: {"configs": [...]}, each a configuration as JSON. Out: {"ready": true} once, then {"begin": n} and
{"end": n, "outcome": {...}}. What else is printed goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TextIO

import torch

from . import trial
from .parts import from_json

LOST = 3  # exit status of a worker whose GPU answers no more
_KEPT_BYTES = 2 << 30


def main() -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # compilers and libraries print as they like
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # a block's projections, of which the
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False  # mirror, on the CPU, adds up in fp32
    torch.zeros(1, device=device)
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        serve(json.loads(line)["configs"], device, out)


def serve(lines: list[str], device: str, out: TextIO) -> None:
    """Runs configurations in order and says what became of each."""
    for n, line in enumerate(lines):
        print(json.dumps({"begin": n}), file=out, flush=True)
        outcome = trial.run(from_json(line), device)
        print(json.dumps({"end": n, "outcome": outcome.as_dict()}), file=out, flush=True)
        if outcome.lost:
            os._exit(LOST)
    if device == "cuda" and torch.cuda.memory_reserved() > _KEPT_BYTES:
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
