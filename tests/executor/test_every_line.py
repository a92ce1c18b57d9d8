"""Each wait, arrival, fence, barrier and copy in of the Hopper kernels is needed: without it the executor finds a fault. So is
what lets the next launch begin.

So it sees them all; and one that it would not miss is either superfluous or beyond it.
"""

import ast
import functools
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ssd.registry import get_variant
from ssd.types import Options
from tests.errors import results
from tests.executor import Executor, Fault
from tests.fused.hopper_on_cpu import KERNELS, hopper_on_cpu
from tests.inputs import Case, Shape, random_inputs

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs the other kernels")
CALLS = {"wait", "arrive", "expect", "fence_async_shared", "block_barrier", "store_wait", "warpgroup_mma_wait",
         "async_copy_global_to_shared", "async_load", "wait_full", "wait_empty", "mark_full", "mark_empty", "let_next_begin",
         "wait_for_last"}
NOT_MISSED = {
    # A barrier of the warps after a loop that ends with one. It runs at least once.
    ("step += 1", "block_barrier()", "mark_empty(rings.tiles, kept)"),
    # Warps that wait for one phase must meet before the next but one begins; here a role's warps wait together.
    ("wait_full(rings.tiles, step + pieces)", "block_barrier()",
     "mark_empty(rings.tiles, slot_of(rings.tiles, step + pieces))"),
    # Before a loop, after an arrival: Triton would put a barrier into each turn of it.
    ("state, fetched = add_fetched_pieces(state, start, run, rings.tiles, tiles, fetched, STATE, U, ROWS, WIDTH)",
     "block_barrier()  # or Triton would put one into every step of the loop", "else:"),
    ("pieces += 1", "block_barrier()  # as in `wide_scan.scan_slice`", "first, last = run.first, run.last"),
}
SHAPE = Shape(1, 5 * 64 - 7, 4, 64, 1, 64, 64)
# Some lines are needed where others do not happen to do their work: in more stages, for one head alone, in cut sequences.
WAYS = {"recomputed": (Options(save_states=False), {}), "saved": (Options(), {}),
        "a head in each part": (Options(save_states=False), {"splits": 4}),
        "cut": (Options(), {"blocks": 5, "cut": (2, 2)}),
        "asked states": (Options(save_states=False, stationary=False), {}),
        "documents": (Options(save_states=False), {}),
        "documents, cut": (Options(), {"blocks": 5, "cut": (1, 4)}),
        "long pieces": (Options(), {"blocks": 5, "cut": (4, 4)}), "few states": (Options(save_states=False), {}),
        "dstate 256": (Options(), {"blocks": 3, "cut": (2, 2)}),
        "many pieces": (Options(save_states=False), {"blocks": 10, "cut": (1, 1)}),
        "deferred norm": (Options(), {}), "dstate 192, recomputed": (Options(save_states=False), {}),
        "documents, dstate 256": (Options(), {})}
SIZES = {"asked states": {"seqlen": 4 * 64, "dstate": 128}, "documents": {"seqlen": 100, "nheads": 2},
         "documents, cut": {"seqlen": 100, "nheads": 2},
         "dstate 256": {"dstate": 256, "nheads": 4, "seqlen": 3 * 64 + 7},
         "many pieces": {"dstate": 256, "nheads": 2, "headdim": 128},
         "dstate 192, recomputed": {"dstate": 192, "nheads": 5, "seqlen": 3 * 64 + 7},
         "documents, dstate 256": {"dstate": 256, "seqlen": 100, "nheads": 2}}
# The ways that are tried for a line of a module, first what found the last fault there.
WAYS_OF = {"ring": ["recomputed"], "start": ["cut"], "scan_tiles": ["asked states", "deferred norm"],
           "masks": ["saved", "recomputed", "many pieces"], "scan": ["saved", "recomputed", "deferred norm"],
           "wide_scan": ["dstate 256", "dstate 192, recomputed", "many pieces"],
           "document_states": ["documents"], "states": ["recomputed", "documents", "few states"],
           "group_tiles": ["recomputed", "dstate 256"], "factors": ["recomputed"],
           "group": ["recomputed", "documents, dstate 256", "a head in each part"], "ends": ["dstate 256"],
           "pairs": ["dstate 256"], "walks": ["documents", "recomputed", "few states", "long pieces"],
           "pieces": ["long pieces", "cut", "documents, cut"]}


@functools.cache
def source(kernel: str) -> str:
    return Path(importlib.util.find_spec(kernel).origin).read_text()


def statements(kernel: str) -> list[tuple[int, int]]:
    """First and last line, from 0, of the simple statements that call one of CALLS in a kernel or a part of one."""
    functions = [node for node in ast.parse(source(kernel)).body if isinstance(node, ast.FunctionDef) and node.decorator_list]
    simple = [node for function in functions for node in ast.walk(function) if isinstance(node, ast.Expr | ast.Assign)]
    return sorted((node.lineno - 1, node.end_lineno) for node in simple if _find_called(node) & CALLS)


def _find_called(statement: ast.stmt) -> set[str]:
    functions = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return {getattr(function, "attr", getattr(function, "id", "")) for function in functions}


LINES = [pytest.param(kernel, *lines, id=f"{kernel.rpartition('.')[2]}:{lines[0] + 1}")
         for kernel in KERNELS for lines in statements(kernel)]


@pytest.mark.parametrize(("kernel", "first", "last"), LINES)
def test_needed(kernel, first, last):
    lines = source(kernel).splitlines(keepends=True)
    indent = lines[first][: -len(lines[first].lstrip())]
    without = "".join([*lines[:first], f"{indent}pass\n", *lines[last:]])
    executor = Executor(*KERNELS, edits={kernel: [(source(kernel), without)]})
    ways = WAYS_OF[kernel.rpartition(".")[2]]
    found = next((way for way in ways if _is_faulty(executor, way)), None)
    ways.sort(key=lambda way: way != found)
    is_listed = tuple(line.strip() for line in lines[first - 1 : last + 1]) in NOT_MISSED
    assert (found is None) == is_listed, "".join(lines[first:last])


def _is_faulty(executor: Executor, way: str) -> bool:
    options, dealing = WAYS[way]
    shape = replace(SHAPE, **SIZES.get(way, {}))
    inputs = random_inputs(shape, Case(D="h", dt_dtype=torch.float32), torch.bfloat16)
    if way == "asked states":
        inputs = replace(inputs, return_states_every=64)
    ends = 1
    if way.startswith("documents"):  # that begin at zero, and end with a gradient
        bounds = [0, 20, 60, 100] if way == "documents, cut" else [0, 20, 20, 100]
        inputs, ends = replace(inputs, cu_seqlens=torch.tensor(bounds, dtype=torch.int32)), 3
    ways = torch.randn_like(inputs.x), torch.randn(ends, shape.nheads, shape.headdim, shape.dstate)
    try:
        with hopper_on_cpu(executor, **({"blocks": 1} | dealing)):
            variant = get_variant("fused" if way == "few states" else "persistent")
            if way == "deferred norm":
                variant.scan_deferring_norm(replace(inputs, z=inputs.x), options, torch.ones_like(inputs.x[0, 0]))
            else:
                results(variant, inputs, *ways, options)
    except Fault:
        return True
    return False


@pytest.mark.parametrize("way", WAYS)
def test_with_all_of_them_there_is_no_fault(way):
    assert not _is_faulty(Executor(*KERNELS), way)


def test_many_are_found():
    assert len(LINES) > 70
