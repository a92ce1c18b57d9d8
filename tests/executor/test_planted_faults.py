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
INPUTS = random_inputs(SHAPE, Case(D="h", dt_dtype=torch.float32), torch.bfloat16)
WIDE = random_inputs(replace(SHAPE, dstate=256, nheads=2), Case(D="h", dt_dtype=torch.float32), torch.bfloat16)
DOCUMENTS = replace(random_inputs(Shape(1, 100, 4, 64, 1, 64, 64), Case(dt_dtype=torch.float32), torch.bfloat16),
                    cu_seqlens=torch.tensor([0, 20, 50, 60, 100], dtype=torch.int32), initial_states=torch.randn(4, 4, 64, 64))
ALIGNED = random_inputs(Shape(1, 4 * 64, 4, 64, 1, 128, 64), Case(dt_dtype=torch.float32), torch.bfloat16)


class Plant(NamedTuple):
    """Lines of a kernel's source and what takes their place, and what the fault must name.

    splits: of the heads in the backward; a ring that is shared by more heads comes round only after its slots have been read.
    asked: as `return_states_every`. documents: of few tokens and with states of their own. cut: sub-chunks of a run, into which
    sequences are cut, so that many pieces enter the last one.
    """

    kernel: str
    edits: list[tuple[str, str]]
    says: str
    splits: int | None
    asked: int | None
    documents: int | None
    cut: int | None


def read_plants() -> dict[str, Plant]:
    """By name, which begins with the kernel's module; under it what the fault says, and hunks as of a patch."""
    plants = {}
    text = Path(__file__).with_name("planted.txt").read_text()
    for name, body in re.findall(r"^== ([^\n]*)\n(.*?\n)(?=\n== |\Z)", text, re.M | re.S):
        head, *hunks = body.split("@@\n")
        says, *settings = head.strip().split("\n")
        settings = {name: int(value) for name, value in map(str.split, settings)}
        edits = [(read_side(hunk, " -"), read_side(hunk, " +")) for hunk in hunks]
        kernel = f"fused.kernels.hopper.{name.partition(':')[0]}"
        plants[name] = Plant(kernel, edits, says, *map(settings.get, ("splits", "asked", "documents", "cut")))
    return plants


def read_side(hunk: str, marks: str) -> str:
    return "".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] in marks)


PLANTS = read_plants()


def run(executor: Executor, seed: int, splits: int | None = None, asked: int | None = None,
        documents: int | None = None, cut: int | None = None, wide: bool = False) -> None:
    executor.seed = seed
    inputs, options = WIDE if wide else INPUTS, Options(save_states=wide)
    if asked:  # by halves, of which the second must wait for the first
        inputs, options = replace(ALIGNED, return_states_every=asked), replace(options, stationary=False)
    if documents:
        inputs = DOCUMENTS
    ways = torch.randn_like(inputs.x), torch.randn(4 if documents else 1, inputs.nheads, 64, inputs.dstate)
    dealing = {"blocks": 10, "cut": (cut, cut)} if cut else {"blocks": 1}
    with hopper_on_cpu(executor, **dealing, splits=splits):
        results(get_variant("persistent"), inputs, *ways, options)


@pytest.mark.parametrize("name", PLANTS)
def test_found(name):
    planted = PLANTS[name]
    executor = Executor(*KERNELS, edits={planted.kernel: planted.edits})
    for seed in SEEDS:
        with pytest.raises(Fault) as found:
            run(executor, seed, *planted[3:], wide=name.startswith("wide_scan"))
        print(seed, found.value)
        assert re.search(planted.says, str(found.value)), found.value


@pytest.mark.parametrize("given", ({}, {"wide": True}, {"wide": True, "cut": 1}), ids=str)
def test_without_one_there_is_none(given):
    executor = Executor(*KERNELS)
    for seed in SEEDS:
        run(executor, seed, **given)
