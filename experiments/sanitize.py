"""Every kernel of a variant under compute-sanitizer: accesses outside of memory (memcheck), races in shared memory (racecheck).

compute-sanitizer runs this command line's hidden command `once`: forward and backward once for every case, small, since
a checked kernel is a hundred times slower. Without torch's cache of memory, so that what is outside a tensor is outside an
allocation. It says which kernels it launched; where all variants are run, and `block`, what surrounds the operator, there must
be no kernel that was never launched.

racecheck reports the start of the roles in any kernel that Triton specialises by warps, since it does not follow the barrier
between the warps that write what the roles are to do and those that read it. Both are code that Triton makes for two lines, the
kernel's `def` and its `warp_specialize`, where we can neither read nor write: such reports are counted apart. The variant
`control`, a kernel of two roles that does next to nothing, is there to show them alone; it needs a Hopper GPU.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from triton import knobs

import fused
import persistent
import ssd
from ssd import Options, ssd_chunk_scan
from ssd.block import causal_conv1d_update
from ssd.distributed.part_state import compute_end, compute_start
from ssd.modules import Mamba2LM, Mamba2LMConfig
from ssd.registry import list_candidates
from ssd.runtime.devices import is_hopper
from ssd.types import SSDInputs

from . import record
from .block import PARTS, WIDTH
from .hand_over import hand_over
from .inputs import make_inputs
from .kernel_names import list_ours
from .shapes import SMALL, Shape
from .terminal import make_empty_table, track

BLOCK, CONTROL = "block", "control"
_GPU = torch.device("cuda")  # the current one
VARIANTS = (*list_candidates(), BLOCK, CONTROL)
TOOLS = ("memcheck", "racecheck")
_EXECUTABLE = "compute-sanitizer"
_CHUNK_SIZE = 64
# The first for the plain kernels, ragged in every axis; the others for those for Hopper, CUT long enough to be cut in pieces.
_PLAIN, _TILED = replace(SMALL, headdim=20, dstate=24), Shape("tiled", 1, 600, nheads=8, headdim=64, dstate=128, ngroups=2)
_WIDE, CUT = replace(_TILED, dstate=256), replace(_TILED, seqlen=2000)
_APART = Options(two_level=False, stationary=False, fuse_states=False, fuse_bmm=False, fuse_backward=False)
_CASES = (  # with what is given besides a layer's inputs, of `_make_optional`
    (_PLAIN, torch.float32, ("z", "initial_states", "seq_idx"), Options()),
    (_PLAIN, torch.bfloat16, ("z", "initial_states", "seq_idx"), Options(save_states=False)),
    (_PLAIN, torch.bfloat16, ("z", "initial_states", "seq_idx"), _APART),
    (replace(_PLAIN, batch=1), torch.bfloat16, ("cu_seqlens", "seq_idx"), Options()),
    (replace(_PLAIN, batch=1), torch.bfloat16, ("cu_seqlens",), Options()),
    (_TILED, torch.bfloat16, (), Options()),
    (_TILED, torch.float16, (), Options(save_states=False)),
    (_TILED, torch.bfloat16, ("D",), Options()),
    (_TILED, torch.bfloat16, ("initial_states", "seq_idx"), Options()),
    (_TILED, torch.bfloat16, ("initial_states", "seq_idx"), Options(stationary=False)),
    (_TILED, torch.bfloat16, ("initial_states", "cu_seqlens"), Options()),
    (replace(_PLAIN, batch=1), torch.bfloat16, ("initial_states", "cu_seqlens"), Options()),
    (_WIDE, torch.bfloat16, ("initial_states",), Options()),
    (CUT, torch.bfloat16, (), Options()),
    (CUT, torch.float16, (), Options(save_states=False)),
    (CUT, torch.bfloat16, ("initial_states", "cu_seqlens"), Options()),
    (replace(CUT, dstate=256), torch.bfloat16, (), Options(save_states=False)),
)
# of `block.PARTS`; a scan of few channels and one of many
_PARTS = (("conv1d", _PLAIN), ("gated_norm", _PLAIN), ("state_update", _PLAIN),
          ("selective_scan", Shape("pairs", 2, 70, nheads=20, headdim=1, dstate=16, ngroups=1)),
          ("selective_scan", Shape("walk", 2, 70, nheads=260, headdim=1, dstate=8, ngroups=1)))
_OF_HOPPER = "hopper_", "channel_skip", "document_blocks"  # kernels that run nowhere else begin so
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: \d+ hazards? displayed "
                      r"\((\d+) errors?, (\d+) warnings?\)")
_KERNEL = re.compile(r"\w+_kernel\b")
_REPORT = re.compile(r"^=+ Error: Race reported.*(?:\n=+ +and .*)*", re.MULTILINE)
_ACCESS = re.compile(r"access at (\w+)\+0x[0-9a-f]+ in (\S+):(\d+)")
_LAUNCHED = re.compile(r"^launched (.+)$", re.MULTILINE)
_TOLD = re.compile(r"^=+.*(?:Error|Warning|Invalid|SUMMARY|_kernel).*", re.MULTILINE)  # without the backtraces on the host


def list_variants() -> list[str]:
    """What this GPU can run: the control needs Hopper's barriers."""
    return [name for name in VARIANTS if name != CONTROL or is_hopper(_GPU)]


def run(variants: list[str], tools: list[str], out: Path, console: Console) -> bool:
    """Whether every tool found every variant clean; a row for each pair, appended to its file, and what was found, printed.

    Raises:
        FileNotFoundError: compute-sanitizer is not installed.
    """
    if shutil.which(_EXECUTABLE) is None:
        raise FileNotFoundError(f"{_EXECUTABLE} is not on the PATH; it comes with the CUDA toolkit")
    table = make_empty_table("variant", "tool", "kernels", "found", "of Triton's start of roles")
    whole, clean = {*list_candidates(), BLOCK} <= set(variants), True
    never = {name for name in list_ours() if whole and (is_hopper(_GPU) or not name.startswith(_OF_HOPPER))}
    for variant, tool in track([(v, t) for v in variants for t in tools], console, " ".join):
        found, of_roles, kernels, launched, said = check(variant, tool)
        clean, never = clean and found == of_roles, never.difference(launched)
        record.add([{"bench": "sanitize", "variant": variant, "tool": tool, "found": found, "of_roles": of_roles,
                     "kernels": kernels, "launched": launched}], out)
        table.add_row(variant, tool, str(len(launched)), "nothing" if found == 0 else f"{found} errors and warnings: {kernels}",
                      str(of_roles))
        if found > of_roles:
            console.print(said, markup=False)
    console.print(table)
    if never:
        console.print(f"never launched: {', '.join(sorted(never))}", style="yellow")
    return clean and not never


def check(variant: str, tool: str) -> tuple[int, int, str, list[str], str]:
    """What the tool counted, how much of it is the start of roles, the kernels that it named, those that ran, and what it said.

    Raises:
        ValueError: it ended without a summary.
    """
    command = [_EXECUTABLE, "--tool", tool, sys.executable, "-m", "experiments", "once", "sanitize:run_every_kernel",
               json.dumps({"variant": variant})]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    said = done.stdout + done.stderr
    found = [sum(int(count) for count in counts if count) for counts in _SUMMARY.findall(said)]
    if not found or (done.returncode and not sum(found)):
        raise ValueError(f"{tool} of {variant} ended with exit status {done.returncode} and no summary: {said[-400:]}")
    of_roles = sum(_is_start_of_roles(report) for report in _REPORT.findall(said))
    launched = [name for names in _LAUNCHED.findall(said) for name in names.split()]
    named = set(_KERNEL.findall(_LAUNCHED.sub("", said)))
    return sum(found), of_roles, ", ".join(sorted(named)), launched, "\n".join(_TOLD.findall(said))


def _is_start_of_roles(report: str) -> bool:
    """Whether every access of racecheck's report is known to be at a kernel's `def` or at its `warp_specialize`."""
    found = _ACCESS.findall(report)
    theirs = (_read_line(kernel, file, int(number)).strip().startswith((f"def {kernel}(", "gl.warp_specialize("))
              for kernel, file, number in found)
    return 1 < len(found) == report.count("access at ") and all(theirs)


def _read_line(kernel: str, file: str, number: int) -> str:
    """The line of the file that defines the kernel; nothing if the file is another. racecheck may leave out its folder."""
    folders = (Path(package.__file__).parent for package in (ssd, fused, persistent))
    texts = (path.read_text() for folder in (*folders, Path(__file__).parent) for path in folder.rglob(Path(file).name))
    lines = next((text.splitlines() for text in texts if f"def {kernel}(" in text), [])
    return lines[number - 1] if number <= len(lines) else ""


def run_every_kernel(variant: str) -> None:
    """Every kernel of a variant, once: what `sanitize` runs under compute-sanitizer."""
    launched = set()
    knobs.runtime.launch_enter_hook.add(lambda metadata: launched.add(metadata.get()["name"]))
    if variant == CONTROL:
        source = torch.randn(8, 128, device="cuda")
        assert torch.equal(hand_over(source), source)
    elif variant == BLOCK:
        _run_block()
    else:
        for case in _CASES:
            _run(variant, *case)
    torch.cuda.synchronize()
    print("launched", *sorted(launched))


def _run(variant: str, shape: Shape, dtype: torch.dtype, more: tuple[str, ...], options: Options) -> None:
    """Forward and backward."""
    inputs = make_inputs(shape, dtype, "cuda", requires_grad=True) | _make_optional(shape, dtype, more)
    results = ssd_chunk_scan(**inputs, chunk_size=_CHUNK_SIZE, variant=variant, options=options, return_final_states=True,
                             return_varlen_states="cu_seqlens" in more)
    sum(result.float().sum() for result in results).backward()


def _run_block() -> None:
    """What surrounds the operator, forward and backward."""
    for part, shape in _PARTS:
        work = PARTS[part](shape, torch.bfloat16)
        out = work.ours()
        if work.leaves:
            out.float().sum().backward()
    x, state, weight = (torch.randn(*size, device="cuda") for size in ((2, 70), (2, 70, WIDTH - 1), (70, WIDTH)))
    causal_conv1d_update(x, state, weight, activation="silu")
    config = Mamba2LMConfig(d_model=72, n_layer=1, vocab_size=20, ssm_cfg={"layer": "Mamba2", "headdim": 24, "d_state": 20})
    model = Mamba2LM(config, "cuda", torch.bfloat16)
    with torch.no_grad():
        model.step(torch.zeros(2, dtype=torch.int64, device="cuda"), model.new_cache(2))  # few enough for three launches
    part = replace(_PLAIN, seqlen=2100)  # which several programs share
    i = SSDInputs(**make_inputs(part, torch.bfloat16, "cuda"), chunk_size=_CHUNK_SIZE)
    compute_end(i, False, Options())  # of a rank's part of a sequence
    compute_start(i, i.x, False, Options())


def _make_optional(shape: Shape, dtype: torch.dtype, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Rare arguments by name: a D of two dimensions, a gate, a state to start from, documents, and states at their ends."""
    b, l, h, p, n, _ = shape.sizes.values()
    ends = [0, 5, l // 2, l]
    nstates = len(ends) - 1 if "cu_seqlens" in names else b
    made = {
        "D": lambda: torch.randn(h, p, device="cuda", requires_grad=True),
        "z": lambda: torch.randn(b, l, h, p, device="cuda", dtype=dtype, requires_grad=True),
        "initial_states": lambda: torch.randn(nstates, h, p, n, device="cuda", requires_grad=True),
        "seq_idx": lambda: (torch.arange(l, device="cuda") // 37).to(torch.int32).expand(b, l).contiguous(),
        "cu_seqlens": lambda: torch.tensor(ends, device="cuda", dtype=torch.int32),
    }
    return {name: made[name]() for name in names}
