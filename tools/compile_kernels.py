"""Compiles every kernel that a variant's forward and backward launch, for a GPU that need not be there.

    python tools/compile_kernels.py --arch 90 --dtype bf16 --headdim 64 --dstate 128 --chunk-size 256

prints a line per kernel and config: registers and spilled bytes per thread, shared memory, tensor-core instructions and how
many groups the wgmma among them are waited for in.
The launchers run as they are, on CPU tensors: a stand-in for Triton's driver names the chip, and a launch ends where it
would start. It needs a process of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    sys.path[0] = str(Path(__file__).parents[1])  # in place of this folder, whose `ssd` are the tests of that package

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from fused import hopper
from ssd.distributed import part_state
from ssd.registry import Variant, adapt_to_documents, config_spaces, get_variant
from ssd.runtime import foreign_descriptors, launch, lost_operands, machine_code, trust, tuning
from ssd.runtime.machine_code import find_once, lanes_apart, list_ptx_loops
from ssd.types import Options, SSDGrads, SSDInputs
from tests.inputs import EVERYTHING, Case, Shape, random_inputs
from tools.late_loads import late_loads

# Name of the chip's config file, and the shared memory that one block may ask for.
CHIPS = {
    80: tuning.Device("a100", 163 * 1024, major=8),
    90: tuning.Device("h200", 227 * 1024),
    100: tuning.Device("b200", 227 * 1024, major=10),
    120: tuning.Device("rtx_5090", 99 * 1024, major=12),
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_measurements: dict[tuple[str, bool], Compiled] = {}
_LEFT_OUT = SimpleNamespace(asm={"ptx": ""})  # in place of a kernel that is not compiled
# Called by launches, and again by what measures what they compiled.
inspect, find_foreign_descriptors, find_lost_operands = map(lru_cache(maxsize=256), (
    machine_code.inspect, foreign_descriptors.find_foreign_descriptors, lost_operands.find_lost_operands))
USUAL = Case(D="h", dt_bias=True, dt_softplus=True)  # what models use most, and what is timed


@dataclass(frozen=True)
class Compiled:
    """One kernel as compiled: bytes of shared memory per block, registers and spilled bytes per thread."""

    triton: str
    kernel: str
    config: str
    registers: int
    spills: int
    shared: int
    wgmma: int
    groups: int | None  # of wgmma that are waited for together, in machine code, if that was read, as it is where there are
    # wgmma: where ptxas runs them one by one, as many as these
    mma: int
    dots: int  # matrix products in Triton's own terms
    apart: int  # additions after which two lanes hold different sums, see lanes_apart
    unfenced: int  # loops that fill tiles for wgmma by cp.async without a fence between the two proxies
    ptx: str  # a digest, by which two can be told apart
    late: list[str] | None  # loads that an mbarrier does not wait for, see late_loads, if the machine code was read
    lost: list[str] | None  # products whose operand is overwritten, see lost_operands, likewise; not of Gluon kernels
    foreign: list[str] | None  # instructions with another's descriptor, or none, see foreign_descriptors, likewise


class _Driver:
    """What Triton's front end asks a driver for. Kernels are kept per device, so the chip serves as its number."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def collect_kernels(arch: int, only: tuple[str, ...] = (), once: bool = False) -> Iterator[dict[str, object]]:
    """Launches compile for `arch` and do not run; yields what was compiled, by its hash. only: parts of kernels' names, if any,
    of which a name must have one; once: a kernel is compiled in the first of its forms alone.
    """
    compiled, launch, current_device, is_hopper = {}, JITFunction.run, tuning.current_device, hopper.is_hopper

    def compile_only(self, *args, grid, warmup, **kwargs):
        unwanted = only and not any(part in self.__name__ for part in only)
        if unwanted or (once and any(kernel.name == self.__name__ for kernel in compiled.values())):
            return _LEFT_OUT
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        if not warmup:  # a trial, of what may not be launched
            compiled[kernel.hash] = kernel
        return kernel

    driver.set_active(_Driver(arch))
    JITFunction.run = compile_only
    tuning.current_device = hopper.current_device = lambda index: CHIPS[arch]
    hopper.is_hopper = lambda device: arch == 90
    tuning._pick.cache_clear()
    try:
        yield compiled
    finally:
        JITFunction.run, hopper.is_hopper = launch, is_hopper
        tuning.current_device = hopper.current_device = current_device
        tuning._pick.cache_clear()


def use_installed_tools() -> None:
    """A Triton that came without some of its binaries, to be small, uses those of the CUDA toolkit on the PATH."""
    own = Path(triton.__file__).parent / "backends/nvidia/bin"
    for variable, binary, installed in (("TRITON_CUOBJDUMP_PATH", "cuobjdump", "cuobjdump"),
                                        ("TRITON_NVDISASM_PATH", "nvdisasm", "nvdisasm"),
                                        ("TRITON_PTXAS_BLACKWELL_PATH", "ptxas-blackwell", "ptxas")):
        if not (own / binary).exists() and (found := shutil.which(installed)):
            os.environ.setdefault(variable, found)


def forward_backward(variant: Variant, inputs: SSDInputs, options: Options) -> None:
    out, final_states, saved = variant.forward(inputs, options, True)
    variant.backward(saved, torch.empty_like(out), torch.empty_like(final_states), SSDGrads())


def sum_part(_: Variant, inputs: SSDInputs, options: Options) -> None:
    part_state.compute_end(inputs, False, options)
    part_state.compute_start(inputs, inputs.x, False, options)


def scan_deferring_norm(variant: Variant, inputs: SSDInputs, options: Options) -> None:
    variant.scan_deferring_norm(inputs, options, torch.ones(inputs.x.shape[2:], dtype=inputs.x.dtype))


def compile_all(run: Callable[[], None], inputs: SSDInputs, arch: int, configs: int, **which: object) -> list[Compiled]:
    """Every kernel that `run` launches on inputs; and with `configs`, each in so many of those that a tuner may try. which: as
    `collect_kernels` takes it.
    """
    sizes = (inputs.x.dtype, inputs.headdim, inputs.dstate, inputs.chunk_size, CHIPS[arch])
    with collect_kernels(arch, **which) as compiled:
        run()
        for kernel, space in config_spaces().items() if configs else ():
            tried = space.configs(*sizes)
            for config in tried[:: -(-len(tried) // configs)]:
                with tuning.force_config(kernel, config):
                    run()
    return sorted((_measure_once(kernel, not configs) for kernel in compiled.values()), key=lambda c: (c.kernel, c.config))


def _measure_once(kernel, disassemble: bool) -> Compiled:
    """_measure, once for each kernel, of which most are compiled again and again."""
    key = kernel.hash, disassemble
    if key not in _measurements:
        _measurements[key] = _measure(kernel, disassemble)
    return _measurements[key]


def _measure(kernel, disassemble: bool) -> Compiled:
    names = kernel.src.fn.arg_names
    constants = {names[path[0]]: value for path, value in kernel.src.constants.items()}
    config = [f"{k.removeprefix('BLOCK_')}={v}" for k, v in constants.items() if k.startswith(("BLOCK", "STAGES"))]
    config += [f"warps={kernel.metadata.num_warps}", f"stages={kernel.metadata.num_stages}"]
    registers, spills = find_resources(kernel.kernel)
    ptx = kernel.asm["ptx"]
    groups = late = lost = foreign = None
    if disassemble and "wgmma.mma_async" in ptx:
        searches = late_loads, find_lost_operands, find_foreign_descriptors
        groups, late, lost, foreign = find_once(_search, kernel.kernel, *searches)
        lost = lost if "ttir" in kernel.asm else []
    return Compiled(triton.__version__, kernel.name, " ".join(config), registers, spills, kernel.metadata.shared,
                    ptx.count("wgmma.mma_async"), groups, ptx.count("mma.sync") + ptx.count("tcgen05.mma"),
                    kernel.asm.get("ttir", "").count("tt.dot "), lanes_apart(ptx), _count_unfenced(ptx),
                    hashlib.sha256(ptx.encode()).hexdigest()[:16], late, lost, foreign)


def _count_unfenced(ptx: str) -> int:
    lines, loops = list_ptx_loops(ptx)
    loops = ["\n".join(lines[first:last]) for first, last in loops]
    return sum("wgmma.mma_async" in loop and "cp.async.wait" in loop and "fence.proxy.async" not in loop for loop in loops)


def find_resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack per thread. Triton's kernels have no arrays: what is on the stack was spilled."""
    registers, stack = find_once(_read_resources, cubin)
    return registers, stack


def _read_resources(cubin: bytes) -> tuple[int, int]:
    said = inspect(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", said).groups()
    return int(registers), int(stack)


def _search(cubin: bytes) -> tuple[int, list[str], list[str], list[str]]:
    """Groups of products that are waited for together, and late loads, lost operands and foreign descriptors."""
    sass = inspect(knobs.nvidia.nvdisasm.path, "-c", cubin)
    # the last instruction of a group names the barrier that counts it
    groups = len(re.findall(r"HGMMA.*gsb", sass))
    return groups, late_loads(sass), find_lost_operands(sass), find_foreign_descriptors(sass)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="baseline")
    parser.add_argument("--arch", type=int, choices=CHIPS, default=90)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    for name, default in (("seqlen", 512), ("nheads", 64), ("headdim", 64), ("ngroups", 1), ("dstate", 128),
                          ("chunk-size", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--every-option", action="store_true", help="z, seq_idx, initial states, varlen states ...")
    parser.add_argument("--configs", type=int, default=0, help="each kernel in so many of the configs that a tuner may try, "
                        "spread over all")
    parser.add_argument("--initial-states", action="store_true")
    parser.add_argument("--documents", action="store_true", help="packed by seq_idx")
    parser.add_argument("--document-states", action="store_true", help="packed by cu_seqlens, with a state of each")
    parser.add_argument("--asked", type=int, help="as return_states_every")
    parser.add_argument("--C-dtype", choices=DTYPES, help="of C, where it is not that of x")
    parser.add_argument("--distrust", action="store_true", help="as if a fault were found in each kernel with wgmma")
    parser.add_argument("--state-dtype", choices=DTYPES, help="of the states between chunks")
    parser.add_argument("--off", type=lambda names: dict.fromkeys(names.split(","), False), default={},
                        help="fields of ssd.Options to switch off, separated by commas")
    parser.add_argument("--z", action="store_true")
    parser.add_argument("--part", action="store_true", help="what sums up a part of a sequence over several GPUs instead")
    parser.add_argument("--deferred-norm", action="store_true", help="a forward whose gated norm is finished later instead")
    parser.add_argument("--only", type=lambda parts: tuple(parts.split(",")), default=(), help="kernels whose names "
                        "have one of these in them, separated by commas")
    parser.add_argument("--once", action="store_true", help="each kernel in one form, where there are several")
    parser.add_argument("--triton", metavar="V", help="fail unless this is the version of Triton")
    parser.add_argument("--serve", action="store_true", help="for each line of input, a JSON list of arguments, answer with a "
                        "line, a JSON list of what would be printed, or a string that says what failed")
    return parser.parse_args(given)


def compile_kernels(a: argparse.Namespace) -> list[Compiled]:
    shape = Shape(1, a.seqlen, a.nheads, a.headdim, a.ngroups, a.dstate, a.chunk_size)
    case = replace(EVERYTHING, documents="varlen") if a.every_option else USUAL
    case = replace(case, initial_states=case.initial_states or a.initial_states, state_dtype=DTYPES.get(a.state_dtype),
                   C_dtype=DTYPES.get(a.C_dtype), documents="seq_idx" if a.documents else case.documents)
    case = replace(case, z=case.z or a.z)
    if a.document_states:
        case = replace(case, documents="states", initial_states=True)
    inputs = replace(random_inputs(shape, case, DTYPES[a.dtype]), return_states_every=a.asked)
    trusted = (lambda kernel: ("wgmma" in kernel.asm["ptx"] and "distrusted") or None) if a.distrust else launch.find_fault
    with patch.object(launch, "find_fault", trusted), patch.multiple(
            trust, inspect=inspect, find_foreign_descriptors=find_foreign_descriptors,
            find_lost_operands=find_lost_operands):
        call = sum_part if a.part else scan_deferring_norm if a.deferred_norm else forward_backward
        run = partial(call, adapt_to_documents(get_variant(a.variant), inputs), inputs, Options(**a.off))
        return compile_all(run, inputs, a.arch, a.configs, only=a.only, once=a.once)


def serve() -> None:
    for line in sys.stdin:
        try:
            answer = [asdict(row) for row in compile_kernels(arguments(json.loads(line)))]
        except Exception:
            answer = traceback.format_exc()
        print(json.dumps(answer), flush=True)


def main() -> None:
    use_installed_tools()
    a = arguments()
    if a.triton and triton.__version__ != a.triton:
        raise SystemExit(f"got Triton {triton.__version__}, asked for {a.triton}")
    if a.serve:
        serve()
        return
    rows = compile_kernels(a)
    width, config = (max(len(getattr(row, name)) for row in rows) for name in ("kernel", "config"))
    print(f"{'kernel':{width}} {'config':{config}} registers spills shared wgmma groups mma")
    for r in rows:
        numbers = f"{r.registers:9} {r.spills:6} {r.shared:6} {r.wgmma:5} {'' if r.groups is None else r.groups:6} {r.mma:3}"
        print(f"{r.kernel:{width}} {r.config:{config}} {numbers}")


if __name__ == "__main__":
    main()
