"""The process that runs configurations: batches of them in through a pipe, a message before each and one after it."""

import os
from multiprocessing.connection import Connection

import torch

from . import trial
from .parts import from_json

LOST = 3  # exit status of a worker whose GPU answers no more
_KEPT_BYTES = 2 << 30


def main(pipe: Connection, said: str) -> None:
    """Takes batches, lists of configurations as JSON, until the pipe is closed.

    Sends (None, None) once it is ready, then (n, None) when the n-th of a batch begins, and (n, its `trial.Outcome`).

    Args:
        said: the file that all that is printed goes to.
    """
    os.setsid()
    with open(said, "w") as file:
        os.dup2(file.fileno(), 1)  # compilers and libraries print as they like
        os.dup2(file.fileno(), 2)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # a block's projections, of which the
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False  # mirror, on the CPU, adds up in fp32
    torch.zeros(1, device=device)
    pipe.send((None, None))
    while True:
        try:
            lines = pipe.recv()
        except EOFError:
            return
        for n, line in enumerate(lines):
            pipe.send((n, None))
            outcome = trial.run(from_json(line), device)
            pipe.send((n, outcome))
            if outcome.lost:
                os._exit(LOST)
        if device == "cuda" and torch.cuda.memory_reserved() > _KEPT_BYTES:
            torch.cuda.empty_cache()
