"""docs/kernels.md says what is launched, in which order, from which file, and which files a call goes through."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from experiments import kernel_names, record
from ssd import Options, ssd_chunk_scan
from ssd.runtime import launch as launching
from tests.executor import Executor
from tests.fused.hopper_on_cpu import KERNELS, hopper_on_cpu
from tests.programs import ROOT

PAGE = (ROOT / "docs/kernels.md").read_text()
PLAIN, HOPPER = "plain Triton", "Hopper"


def read_table(title: str, header: str) -> list[list[str]]:
    """Rows of the first table with that header below the title."""
    lines = re.search(rf"^{re.escape(header)}.*\n.*\n((?:\|.*\n)*)", PAGE[PAGE.index(title):], re.M)[1].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def find_names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


LAUNCHES = {(variant, kernels.partition(",")[0], direction): find_names(launches)
            for variants, kernels, direction, launches in read_table("## Launches", "| variant | kernels")
            for variant in find_names(variants)}
FILES = {name: path for kernel, path, _ in read_table("## Kernels", "| kernel | file")
         for name, path in zip(find_names(kernel), find_names(path), strict=True)}


LEFT_OUT = {*find_names(re.search(r"^Left out are files.*?\n\n", PAGE, re.M | re.S)[0]), "ssd/runtime/launch.py"}
# Without a GPU device functions run as Python.
DEVICE = {"ssd/kernels/device.py", "ssd/runtime/dependent_launch.py", "ssd/runtime/interpreter.py",
          *(f"fused/kernels/hopper/{name}.py" for name in ("ring", "roles", "start", "early", "scan_tiles"))}


def read_way(direction: str) -> list[str]:
    return [find_names(row[0])[0] for row in read_table(f"**{direction}**\n\n| file", "| file")]


def make_call(variant: str, dtype: torch.dtype) -> tuple[Callable, Callable]:
    """A forward, and the backward of it, at the sizes that Hopper's kernels take."""
    rng = torch.Generator().manual_seed(0)
    batch, seqlen, nheads, headdim, dstate = 1, 128, 2, 64, 64
    x, B, C = (torch.randn(batch, seqlen, h, n, generator=rng).to(dtype)
               for h, n in ((nheads, headdim), (1, dstate), (1, dstate)))
    x.requires_grad_()
    dt, A = torch.rand(batch, seqlen, nheads, generator=rng), -torch.rand(nheads, generator=rng)
    left = []

    def forward():
        left.append(ssd_chunk_scan(x, dt, A, B, C, chunk_size=64, D=torch.ones(nheads), dt_bias=torch.zeros(nheads),
                                   dt_softplus=True, variant=variant, options=Options(segments=False)))

    return forward, lambda: left.pop().sum().backward()


@contextmanager
def record_launches() -> Iterator[list[str]]:
    """Names of the kernels that are launched meanwhile, in order."""
    found, launch, execute = [], launching._compile_and_launch, Executor._launch

    def note(kernel, *args):
        found.append(kernel.fn.__name__)
        return launch(kernel, *args)

    def note_executed(executor, kernel, *args, **config):
        found.append(kernel.function.__name__)
        return execute(executor, kernel, *args, **config)

    with patch.object(launching, "_compile_and_launch", note), patch.object(Executor, "_launch", note_executed):
        yield found


@contextmanager
def record_files() -> Iterator[list[str]]:
    """Files of this tree whose functions are entered meanwhile, in the order in which they first are."""
    found: dict[str, None] = {}

    def note(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            found.setdefault(path.relative_to(ROOT).as_posix())

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)


def check(names: list[str], variant: str, kernels: str, direction: str) -> None:
    """Sums of parts, which depend on how many heads share a program, are not in the table."""
    launched = [name.removesuffix("_kernel") for name in names if not name.startswith("sum_")]
    assert launched == LAUNCHES[variant, kernels, direction]


def test_kernels_are_in_the_files_that_are_named():
    assert len(FILES) > 20
    for name, path in FILES.items():
        assert f"def {name}_kernel(" in (ROOT / path).read_text(), (name, path)
    assert {name for launches in LAUNCHES.values() for name in launches} <= FILES.keys()


def test_every_kernel_of_the_operator_is_named():
    kernels = {name for folder in kernel_names.OF_OPERATOR for path in (ROOT / folder).rglob("*.py")
               for name in re.findall(r"^def (\w+)_kernel\(", path.read_text(), re.M)}
    assert kernels == FILES.keys()


def test_kernels_of_committed_rows_are_known():
    """By their present name, or by an old one that the page translates."""
    old = {name for row in read_table("Rows and the [log]", "| old | new") for name in find_names(row[0])}
    rows = [row["kernel"] for row in record.read() if isinstance(row.get("kernel"), str)]
    ours = {name.removesuffix("_kernel") for name in rows if re.fullmatch(r"[a-z]\w*_kernel", name)}
    known = {name.removesuffix("_kernel") for name in kernel_names.list_ours()} | old
    assert {"hopper_scan", "chunk_scan"} <= ours <= known


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted without a GPU")
@pytest.mark.parametrize("variant", ("baseline", "fused", "persistent"))
def test_launches_in_plain_triton(variant):
    forward, backward = make_call(variant, torch.float32)
    for direction, run in (("forward", forward), ("backward", backward)):
        with record_launches() as names:
            run()
        check(names, variant, PLAIN, direction)


@pytest.fixture(scope="module")
def executor() -> Executor:
    return Executor(*KERNELS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted without a GPU")
@pytest.mark.parametrize("variant", ("fused", "persistent"))
def test_launches_and_files_on_hopper(variant, executor):
    forward, backward = make_call(variant, torch.float16)
    with hopper_on_cpu(executor, blocks=1):
        forward(), backward()  # imports what a later call finds
        for direction, run in (("forward", forward), ("backward", backward)):
            with torch.autograd.set_multithreading_enabled(False), record_launches() as names, record_files() as files:
                run()
            check(names, variant, HOPPER, direction)
            if variant == "persistent":
                way = read_way(direction.capitalize())
                assert way == [path for path in files if path in way], "in the order in which files are first entered"
                ours = {path for path in files if path.startswith(("ssd/", "fused/", "persistent/"))}
                assert ours - {*way} <= LEFT_OUT | DEVICE
