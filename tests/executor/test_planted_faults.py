"""Faults planted into the Hopper kernels' sources: the executor finds each in every schedule, and says where it is.

`test_every_line` leaves out what stands in one line; these are also moved, miscounted or of the wrong phase.
"""

import re
from dataclasses import dataclass, replace

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
INPUTS = random_inputs(Shape(1, 5 * 64 - 7, 4, 64, 1, 64, 64), Case(D="h", dt_dtype=torch.float32), torch.bfloat16)


@dataclass(frozen=True)
class Plant:
    """Texts of a kernel's source and what takes their place, and what the fault must name."""

    kernel: str
    edits: tuple[tuple[str, str], ...]
    says: str
    splits: int | None = None  # of the heads in the backward


def plant(kernel: str, old: str, new: str, says: str, *more: tuple[str, str]) -> Plant:
    return Plant(f"fused.kernels.hopper.{kernel}", ((old, new), *more), says)


GIVEN_BACK = """\
            # not before y is there: a load from x that is only on its way would find the next tile (docs/log/hopper-scan.md)
            mark_empty(rings.tiles, slot)
"""
TAKEN = "            mark_empty(rings.masks, mask)\n"
SUMS = "            gl.store(sums.output + at + i, outputs)\n"
READY = """\
                fence_async_shared()
                block_barrier()
                mark_full(rings.masks"""
FULL_MASKS = """\
            wait_full(rings.tiles, step)
            B, C = get_tile(tiles.B, slot, BLOCK_M, WIDTH), get_tile(tiles.C, slot, BLOCK_M, WIDTH)
            BC"""
LAST_COPY = """\
store_wait(0)
            block_barrier()
"""
PAIRS = """\
        tiles.dCB.store(dCB)
        fence_async_shared()
"""
PLANTS = {
    "scan: a stage given back before x has been used": plant(
        "scan", GIVEN_BACK, "", r"copy in of Xs\[\d\].*load of Xs\[\d\] by role . \(scan_slice\).*D_h",
        (TAKEN, TAKEN + GIVEN_BACK)),
    "scan: no wait for B and C": plant(
        "scan", FULL_MASKS, FULL_MASKS.partition("\n")[2],
        r"product of .s\[0\] by role 2 \(make_masks\).*(copy in of .s\[0\]|nothing has)"),
    "scan: a mask's wrong phase": plant(
        "scan", "wait_full(rings.masks, step, HEAD, HEADS)", "wait_full(rings.masks, step + 2, HEAD, HEADS)",
        r"deadlock|load of to_end\[.\] by role . \(scan_slice\)"),
    "scan: no fence behind a mask": plant(
        "scan", READY, READY.partition("\n")[2], r"product of Ls\[.\].*no fence_async_shared"),
    "scan: no barrier before a mask is handed over": plant(
        "scan", READY, READY.replace("                block_barrier()\n", ""),
        r"(A_columns|A_rows|Ls)\[.\].*store.*make_masks|make_masks.*no barrier"),
    "scan: no barrier between warps' parts of a vector": plant(
        "scan", "            block_barrier()\n            BC = ", "            BC = ",
        r"load of A_columns\[0\].*store of A_columns\[0\]"),
    "scan: no wait for y on its way out": plant(
        "scan", LAST_COPY, LAST_COPY.replace("0", "1"), r"store of Ys\[.\].*copy out of Ys\[.\].*on its way"),
    "scan: too few bytes expected": plant(
        "scan", "(2 * CHANNELS + 2 * WIDTH)", "(2 * CHANNELS + WIDTH)",
        r"full\[.\]: phase . is complete with . copies|nothing has written|told|lacks 0"),
    "scan: too many bytes expected": plant(
        "scan", "(2 * CHANNELS + 2 * WIDTH)", "(2 * CHANNELS + 3 * WIDTH)", r"deadlock(.|\n)*\d bytes"),
    "scan: an arrival too few": plant(
        "scan", "make_ring(STAGES, 3)", "make_ring(STAGES, 4)", r"deadlock(.|\n)*fetch_tiles.*lacks 1 of 4 arrivals"),
    "scan: an arrival too many": plant(
        "scan", "make_ring(STAGES, 3)", "make_ring(STAGES, 2)",
        r"copy in of .s\[.\] by role 3 \(fetch_tiles\)|arrivals at tiles.empty"),
    "scan: no fence behind the mbarriers": plant(
        "scan", "    fence_async_shared()\n    tiles, vectors", "    tiles, vectors",
        r"no fence_async_shared followed the init of rings\.tiles\.full\[0\]"),
    "states: a ring that is too small": plant(
        "states", "U * KEPT + kept % KEPT", "U * KEPT", r"store of Ss\[.\].*copy out of Ss\[.\]"),
    "states: a wait for one copy too few": plant(
        "states", "store_wait(KEPT - 1)", "store_wait(KEPT)", r"store of Ss\[.\].*copy out of Ss\[.\].*on its way"),
    "states: no barrier before a stage is given back": plant(
        "states", "            block_barrier()\n            mark_empty(", "            mark_empty(",
        r"copy in of (Xs\[.\].*load of Xs|Bs\[.\].*product of Bs)\[.\].*barrier of its warps"),
    "states: a free stage's wrong phase": plant(
        "states", "wait_empty(ring, step)", "wait_empty(ring, step + 3)", r"deadlock(.|\n)*fetch_tiles.*ring.empty\[0\]"),
    "group: a stage given back before dy has been used": plant(
        "group", SUMS, "", r"(copy in of dYs|store of A_).*load of .* by role 0 \(compute_dC\)",
        ("            step += 1\n        dCB = ", SUMS + "            step += 1\n        dCB = ")),
    # with more heads the ring's slots come round, which only happens after dB has read the pairs
    "group: pairs over those not read yet, of one head": replace(plant(
        "group", "        wait_empty(rings.pairs, turn)\n", "", r"store of dCBs by role 0.*product of dCBs"),
        splits=4),
    "group: no fence behind the pairs": plant("group", PAIRS, PAIRS.partition("\n")[0] + "\n", r"product of dCBs.*no fence"),
    "group: phases that are not flipped": plant(
        "ring", "return slot, phases ^ (1 << slot)", "return slot, phases", r"nothing has written|told|lacks 0|deadlock"),
    "group: too few slots": plant("group", "SLOTS, LINES = 4, 3", "SLOTS, LINES = 1, 3", r"deadlock|copy in"),
    "group: vectors given back by two of three": plant(
        "group", "make_ring(LINES, 3)", "make_ring(LINES, 2)",
        r"store of (A_columns|A_rows|steps)\[.\].*fetch_vectors|arrivals at vectors.empty|deadlock"),
    "group: an accumulator used before the wait": plant(
        "group", "            v = warpgroup_mma_wait(0, deps=(v,))\n", "", r"uses an accumulator"),
    "group: a wait that covers too little": plant(
        "group", "            v = warpgroup_mma_wait(0, deps=(v,))\n", "            v = warpgroup_mma_wait(1, deps=(v,))\n",
        r"does not cover an accumulator"),
}


def run(executor: Executor, seed: int, splits: int | None = None) -> None:
    executor.seed = seed
    ways = torch.randn_like(INPUTS.x), torch.randn(1, 4, 64, 64)
    with hopper_on_cpu(executor, blocks=1, splits=splits):
        results(get_variant("persistent"), INPUTS, *ways, Options(save_states=False))


@pytest.mark.parametrize("name", PLANTS)
def test_found(name):
    planted = PLANTS[name]
    executor = Executor(*KERNELS, edits={planted.kernel: list(planted.edits)})
    for seed in SEEDS:
        with pytest.raises(Fault) as found:
            run(executor, seed, planted.splits)
        print(seed, found.value)
        assert re.search(planted.says, str(found.value)), found.value


def test_without_one_there_is_none():
    executor = Executor(*KERNELS)
    for seed in SEEDS:
        run(executor, seed)
