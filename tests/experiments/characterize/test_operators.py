"""Rules: each on its own examples, in an order that matters, and complete for the kernels of this repository."""

import json
import re
from pathlib import Path

import pytest

from experiments.characterize.operators import CLASSES, KERNEL_RULES, OP_RULES, SCOPE_RULES, classify
from experiments.kernel_names import RENAMED, is_of_operator, list_ours
from experiments.table import shorten_kernel
from tests.programs import ROOT

OWN = (0, 1, 2)  # rules whose names are those of the source tree
EXAMPLES = json.loads((Path(__file__).parent / "kernel_examples.json").read_text())  # names by class, some shortened at `...`


def wrong(rules) -> list[str]:
    """Kernels that these rules put into another class."""
    return [example for kind, examples in EXAMPLES["kernels"] for example in examples if classify(example, rules=rules) != kind]


def test_every_rule_finds_its_examples():
    assert wrong(KERNEL_RULES) == []
    assert [e for kind, examples in EXAMPLES["operators"] for e in examples if classify("?", ops=[e]) != kind] == []
    assert [e for kind, examples in EXAMPLES["scopes"] for e in examples if classify("?", scopes=[e]) != kind] == []
    assert [kind for kind, _ in EXAMPLES["kernels"]] == [kind for n, (kind, _) in enumerate(KERNEL_RULES) if n not in OWN]
    assert [kind for kind, _ in EXAMPLES["operators"]] == [kind for kind, _ in OP_RULES]
    assert [kind for kind, _ in EXAMPLES["scopes"]] == [kind for kind, _ in SCOPE_RULES]
    assert {kind for kind, _ in (*KERNEL_RULES, *OP_RULES, *SCOPE_RULES)} == {*CLASSES} - {"other"}


@pytest.mark.parametrize("first, second, caught", [
    ("attention", "conv", "native_sdpa"), ("conv", "gemm", "implicit_gemm"), ("gemm", "reduce", "splitKreduce")])
def test_the_order_matters(first, second, caught):
    """A mutation: two rules swapped, and an example tells."""
    rules = list(KERNEL_RULES)
    a, b = ([kind for kind, _ in rules].index(kind) for kind in (first, second))
    rules[a], rules[b] = rules[b], rules[a]
    assert a < b and any(caught in name for name in wrong(rules))


def test_kernels_of_the_source_tree():
    """Every `def ..._kernel` below any folder of kernels has its rule."""
    found = {name for folder in ("ssd", "fused", "persistent") for path in (ROOT / folder).glob("**/kernels/**/*.py")
             for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.M)}
    assert found == list_ours() and all(sum(bool(KERNEL_RULES[n][1].search(name)) for n in OWN) == 1 for name in found)
    kinds = {name: classify(name) for name in found}
    expected = {"bmm_chunk_kernel": "ssm", "conv1d_bwd_kernel": "conv1d", "gated_norm_kernel": "norm",
                "selective_scan_grads_kernel": "ssm", "bmm_chunk_scan_kernel": "ssm"}
    assert {name: kinds[name] for name in expected} == expected


@pytest.mark.parametrize("old, new", RENAMED.items())
def test_kernels_of_rows_under_old_names(old, new):
    """An old name is of no kernel any more, counts as the new one, and is shown as it."""
    assert new in list_ours() and old not in list_ours()
    assert is_of_operator(old) and classify(old) == classify(new) == "ssm"
    assert shorten_kernel(old) == new


def test_name_before_operator_before_scope():
    assert classify("nvjet_tst_64x8", ["aten::copy_"], ["ssd:loss"]) == "gemm"
    assert classify("new_kernel", ["aten::copy_"], ["ssd:loss"]) == "elementwise"
    assert classify("new_kernel", ["some::op"], ["ssd:loss"]) == "loss"
    assert classify("new_kernel", ["some::op"], ["ssd:forward"]) == "other"


def test_an_operator_inside_another():
    assert classify("vectorized_gather_kernel", ["aten::index_select", "aten::embedding"]) == "embedding"
