"""Several GPUs shared out among xdist's workers."""

import os

import torch


def rotate(names: list[str], worker: str) -> list[str]:
    """The GPUs as the worker gw<n> numbers them: its own first, the others still there for tests of several."""
    first = int(worker.removeprefix("gw")) % len(names)
    return names[first:] + names[:first]


def number_own_first(worker: str) -> None:
    """Numbers this process's GPUs anew. CUDA must not have started: device_count alone does not start it."""
    if (count := torch.cuda.device_count()) > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(rotate(visible.split(","), worker))
