"""Every kernel of a variant under compute-sanitizer: accesses outside of memory (memcheck), races in shared memory (racecheck).

compute-sanitizer runs this command line's hidden command `sanitized`: forward and backward once for every case, small, since
a checked kernel is a hundred times slower. Without torch's cache of memory, so that what is outside a tensor is outside an
allocation.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ssd import Options, ssd_chunk_scan

from . import record
from .shapes import SMALL, Shape, make_inputs

TOOLS = ("memcheck", "racecheck")
_EXECUTABLE = "compute-sanitizer"
_CHUNK_SIZE = 64
# The first for the plain kernels, ragged in every axis; the second for those for Hopper, long enough to be cut in pieces.
_PLAIN, _TILED = replace(SMALL, headdim=20, dstate=24), Shape("tiled", 1, 600, nheads=8, headdim=64, dstate=128, ngroups=2)
_CASES = (
    (_PLAIN, torch.float32, True, Options()),
    (_PLAIN, torch.bfloat16, True, Options(save_states=False)),
    (_TILED, torch.bfloat16, False, Options()),
    (_TILED, torch.float16, False, Options(save_states=False)),
)
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: \d+ hazards? displayed "
                      r"\((\d+) errors?, (\d+) warnings?\)")
_KERNEL = re.compile(r"\w+_kernel\b")
_TOLD = re.compile(r"^=+.*(?:Error|Warning|Invalid|SUMMARY|_kernel).*", re.MULTILINE)  # without the backtraces on the host


def run(variants: list[str], tools: list[str], out: Path, console: Console) -> bool:
    """Whether every tool found every variant clean; a row for each pair, appended to its file, and what was found, printed.

    Raises:
        FileNotFoundError: compute-sanitizer is not installed.
    """
    if shutil.which(_EXECUTABLE) is None:
        raise FileNotFoundError(f"{_EXECUTABLE} is not on the PATH; it comes with the CUDA toolkit")
    table = Table("variant", "tool", "found")
    clean = True
    for variant, tool in track([(v, t) for v in variants for t in tools], "sanitizing", console=console):
        found, kernels, said = check(variant, tool)
        clean = clean and found == 0
        row = {"bench": "sanitize", "variant": variant, "tool": tool, "found": found, "kernels": kernels}
        record.append(row | record.environment(), out)
        table.add_row(variant, tool, "nothing" if found == 0 else f"{found} errors and warnings: {kernels}")
        if found:
            console.print(said, markup=False)
    console.print(table)
    return clean


def check(variant: str, tool: str) -> tuple[int, str, str]:
    """What the tool counted, the kernels that it named, and what it said.

    Raises:
        ValueError: it ended without a summary.
    """
    command = [_EXECUTABLE, "--tool", tool, sys.executable, "-m", "experiments", "sanitized", variant]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    said = done.stdout + done.stderr
    found = [sum(int(count) for count in counts if count) for counts in _SUMMARY.findall(said)]
    if not found or (done.returncode and not sum(found)):
        raise ValueError(f"{tool} of {variant} ended with exit status {done.returncode} and no summary: {said[-400:]}")
    return sum(found), ", ".join(sorted(set(_KERNEL.findall(said)))), "\n".join(_TOLD.findall(said))


def sanitized(variant: str) -> None:
    """Forward and backward of every case."""
    for shape, dtype, every_option, options in _CASES:
        inputs = make_inputs(shape, dtype, "cuda", requires_grad=True)
        if every_option:
            inputs |= _more(shape, dtype)
        out, final_states = ssd_chunk_scan(**inputs, chunk_size=_CHUNK_SIZE, variant=variant, options=options,
                                           return_final_states=True)
        (out.float().sum() + final_states.sum()).backward()
    torch.cuda.synchronize()


def _more(shape: Shape, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The options that models use seldom: a gate, documents, a state to start from."""
    b, l, h, p, n, _ = shape.sizes.values()
    return {
        "z": torch.randn(b, l, h, p, device="cuda", dtype=dtype, requires_grad=True),
        "initial_states": torch.randn(b, h, p, n, device="cuda", requires_grad=True),
        "seq_idx": (torch.arange(l, device="cuda") // 37).to(torch.int32).expand(b, l).contiguous(),
    }
