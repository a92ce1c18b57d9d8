"""Every kernel of a variant under compute-sanitizer: accesses outside of memory (memcheck), races in shared memory (racecheck).

compute-sanitizer runs this command line's hidden command `sanitized`: forward and backward once for every case, small, since
a checked kernel is a hundred times slower. Without torch's cache of memory, so that what is outside a tensor is outside an
allocation.

racecheck reports the start of the roles in any kernel that Triton specialises by warps, since it does not follow the barrier
between the warps that write what the roles are to do and those that read it. Both are code that Triton makes for two lines, the
kernel's `def` and its `warp_specialize`, where we can neither read nor write: such reports are counted apart. The variant
`control`, a kernel of two roles that does next to nothing, is there to show them alone; it needs a Hopper GPU.
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

import ssd
from ssd import Options, ssd_chunk_scan
from ssd.choice import CANDIDATES

from . import record
from .hand_over import hand_over
from .shapes import SMALL, Shape, make_inputs

CONTROL = "control"
VARIANTS = (*CANDIDATES, CONTROL)
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
_REPORT = re.compile(r"^=+ Error: Race reported.*(?:\n=+ +and .*)*", re.MULTILINE)
_ACCESS = re.compile(r"access at (\w+)\+0x[0-9a-f]+ in (\S+):(\d+)")
_TOLD = re.compile(r"^=+.*(?:Error|Warning|Invalid|SUMMARY|_kernel).*", re.MULTILINE)  # without the backtraces on the host


def variants_here() -> list[str]:
    """What this GPU can run: the control needs Hopper's barriers."""
    return [name for name in VARIANTS if name != CONTROL or torch.cuda.get_device_capability()[0] == 9]


def run(variants: list[str], tools: list[str], out: Path, console: Console) -> bool:
    """Whether every tool found every variant clean; a row for each pair, appended to its file, and what was found, printed.

    Raises:
        FileNotFoundError: compute-sanitizer is not installed.
    """
    if shutil.which(_EXECUTABLE) is None:
        raise FileNotFoundError(f"{_EXECUTABLE} is not on the PATH; it comes with the CUDA toolkit")
    table = Table("variant", "tool", "found", "of Triton's start of roles")
    clean = True
    for variant, tool in track([(v, t) for v in variants for t in tools], "sanitizing", console=console):
        found, of_roles, kernels, said = check(variant, tool)
        clean = clean and found == of_roles
        row = {"bench": "sanitize", "variant": variant, "tool": tool, "found": found, "of_roles": of_roles, "kernels": kernels}
        record.append(row | record.environment(), out)
        table.add_row(variant, tool, "nothing" if found == 0 else f"{found} errors and warnings: {kernels}", str(of_roles))
        if found > of_roles:
            console.print(said, markup=False)
    console.print(table)
    return clean


def check(variant: str, tool: str) -> tuple[int, int, str, str]:
    """What the tool counted, how much of it is the start of roles, the kernels that it named, and what it said.

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
    of_roles = sum(_is_start_of_roles(report) for report in _REPORT.findall(said))
    return sum(found), of_roles, ", ".join(sorted(set(_KERNEL.findall(said)))), "\n".join(_TOLD.findall(said))


def _is_start_of_roles(report: str) -> bool:
    """Whether every access of racecheck's report is known to be at a kernel's `def` or at its `warp_specialize`."""
    found = _ACCESS.findall(report)
    theirs = (_line(file, int(number)).strip().startswith((f"def {kernel}(", "gl.warp_specialize("))
              for kernel, file, number in found)
    return 1 < len(found) == report.count("access at ") and all(theirs)


def _line(file: str, number: int) -> str:
    """The line of one of our files, whose folder racecheck may leave out; nothing if it is none of ours."""
    folders = Path(ssd.__file__).parent, Path(__file__).parent
    found = [path for folder in folders for path in folder.rglob(Path(file).name)]
    lines = found[0].read_text().splitlines() if len(found) == 1 else []
    return lines[number - 1] if number <= len(lines) else ""


def sanitized(variant: str) -> None:
    """Every kernel of a variant, once: what `sanitize` runs under compute-sanitizer."""
    if variant == CONTROL:
        source = torch.randn(8, 128, device="cuda")
        assert torch.equal(hand_over(source), source)
        return
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
