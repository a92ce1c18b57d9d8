"""Faults planted into the Hopper kernels' sources: the executor finds each in every schedule, and says where it is.

`test_every_line` leaves out what stands in one line; these are also moved, miscounted or of the wrong phase.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from ssd.registry import get_variant
from ssd.types import Options
from tests.errors import results
from tests.executor import Executor, Fault
from tests.fused.hopper_on_cpu import KERNELS, hopper_on_cpu
from tests.inputs import Case, Shape, random_inputs

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs the other kernels")
SEEDS = range(3)
# Rings go round: a block of the scan has 10 sub-chunks, one of the group several tiles.
SHAPE = Shape(1, 5 * 64 - 7, 4, 64, 1, 64, 64)
# where both parts of a dstate above 128 are in one block
BOTH_PARTS = "wide_scan", "states: both parts"


class Plant(NamedTuple):
    """Lines of a kernel's source and what takes their place, and what the fault must name.

    splits: of the heads in the backward; a ring that is shared by more heads comes round only after its slots have been read.
    """

    kernel: str
    edits: list[tuple[str, str]]
    says: str
    splits: int | None


def read_plants() -> dict[str, Plant]:
    """By name, which begins with the kernel's module; under it what the fault says, and hunks as of a patch."""
    plants = {}
    text = Path(__file__).with_name("planted.txt").read_text()
    for name, body in re.findall(r"^== ([^\n]*)\n(.*?\n)(?=\n== |\Z)", text, re.M | re.S):
        head, *hunks = body.split("@@\n")
        says, _, splits = head.strip().partition("\nsplits ")
        edits = [(read_side(hunk, " -"), read_side(hunk, " +")) for hunk in hunks]
        plants[name] = Plant(f"fused.kernels.hopper.{name.partition(':')[0]}", edits, says, int(splits) if splits else None)
    return plants


def read_side(hunk: str, marks: str) -> str:
    return "".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] in marks)


PLANTS = read_plants()


def run(executor: Executor, seed: int, splits: int | None = None, wide: bool = False) -> None:
    executor.seed = seed
    shape = replace(SHAPE, dstate=256, nheads=2) if wide else SHAPE
    inputs = random_inputs(shape, Case(D="h", dt_dtype=torch.float32), torch.bfloat16)
    ways = torch.randn_like(inputs.x), torch.randn(1, shape.nheads, 64, shape.dstate)
    with hopper_on_cpu(executor, blocks=1, splits=splits, unmeasured=wide):
        results(get_variant("persistent"), inputs, *ways, Options(save_states=wide))


@pytest.mark.parametrize("name", PLANTS)
def test_found(name):
    planted = PLANTS[name]
    executor = Executor(*KERNELS, edits={planted.kernel: planted.edits})
    for seed in SEEDS:
        with pytest.raises(Fault) as found:
            run(executor, seed, planted.splits, name.startswith(BOTH_PARTS))
        print(seed, found.value)
        assert re.search(planted.says, str(found.value)), found.value


@pytest.mark.parametrize("wide", (False, True))
def test_without_one_there_is_none(wide):
    executor = Executor(*KERNELS)
    for seed in SEEDS:
        run(executor, seed, wide=wide)
