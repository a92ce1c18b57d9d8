"""The fuzz of documents with states: in the convolution and in whole blocks."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
import torch

from experiments.fuzz import trial
from experiments.fuzz.block import conv1d_documents, mamba2_documents
from experiments.fuzz.documents import draw_bounds
from experiments.fuzz.parts import DRAWS, from_json, to_json
from ssd.block import conv1d
from ssd.modules import mamba2
from tests.experiments.document_faults import change_arguments, change_results, forget, keep, shift

CONV = conv1d_documents.Config(
    seed=3, dim=10, seqlen=30, width=4, bias=True, activation="silu", ndocs=4, initial_states=True, final_states=True,
    wanted=conv1d_documents.DIFFERENTIABLE, ways=("out", "final_states"), calls=3)
BLOCK = mamba2_documents.Config(
    seed=3, seqlen=30, headdim=8, dstate=8, d_conv=4, rmsnorm=True, conv_bias=True, ndocs=4, states=True, returned=True,
    wanted=("u", "in_proj.weight", "conv_states", "ssm_states"), ways=("out", "final_conv_states", "final_ssm_states"), calls=3)
CACHED = replace(BLOCK, cached=True, returned=False, mode="no_grad", wanted=())
pytestmark = pytest.mark.usefixtures("one_thread")


def test_documents_have_every_length():
    """None, one token, fewer than a filter sees, and most of the row; first and last ones, too."""
    rows = [draw_bounds(Random(seed), 200, 6, 3) for seed in range(200)]
    assert all(row == sorted(row) and len(row) == 7 and row[0] == 0 and row[-1] == 200 for row in rows)
    lengths = [[end - start for start, end in pairwise(row)] for row in rows]
    for place in (0, 3, 5):
        found = {row[place] for row in lengths}
        assert {0, 1, 2} <= found and max(found) > 100
    assert draw_bounds(Random(0), 1, 1, 3) == [0, 1]


def test_draws_reach_every_option():
    configs = [c for index in range(160) for c in DRAWS["block"](1, index, ["auto", "fused"], "cuda", 6)]
    conv, blocks = ([c for c in configs if type(c) is part.Config] for part in (conv1d_documents, mamba2_documents))
    for found, names in ((conv, ("bias", "int64", "initial_states", "final_states", "placed")),
                         (blocks, ("int64", "states", "cached", "returned"))):
        assert all({getattr(c, name) for c in found} == {False, True} for name in names)
        assert all(from_json(to_json(c)) == c and c.batch == 1 for c in found)
    assert {c.activation for c in conv} == {None, "silu", "swish"} and {c.width for c in conv} == {2, 3, 4}
    assert {name for c in conv for name in c.wanted} == {*conv1d_documents.DIFFERENTIABLE}
    assert {name for c in conv for name in c.ways} == {"out", "final_states"}
    assert {c.variant for c in blocks} == {"auto", "fused"}
    assert {name for c in blocks for name in c.wanted} >= {"conv_states", "ssm_states", "u"}
    assert {name for c in blocks for name in c.ways} == {"out", "final_conv_states", "final_ssm_states"}
    assert all(c.states and not c.wanted and c.mode != "compile" for c in blocks if c.cached)


@pytest.mark.parametrize("config", (CONV, replace(CONV, placed=True), replace(BLOCK, variant="baseline"), CACHED),
                         ids=("conv1d", "conv1d in a place", "mamba2", "mamba2 with a cache"))
def test_kernels_pass(config, device):
    outcome = trial.run(replace(config, calls=2), device)
    assert outcome.status == "passed", outcome.why


def begin_from_zeros(right):
    """A convolution that has lost the second document's state."""
    return lambda x, weight, bias, states, *others: right(x, weight, bias, forget(states), *others)


FAULTS = {
    "convolution, a state dropped": (CONV, "out", begin_from_zeros),
    "convolution, another's final state": (CONV, "final_states", change_results(keep, shift)),
    "convolution, no gradient through final states": (
        replace(CONV, wanted=("x",)), "dx", change_results(keep, torch.detach)),
    "convolution, no gradient of states": (
        replace(CONV, wanted=("initial_states",), ways=("out",)), "dinitial_states", change_results(torch.detach, keep)),
    "block, a state dropped": (replace(BLOCK, wanted=()), "out", change_arguments(initial_states=forget)),
    "block, a convolution's state dropped": (replace(BLOCK, wanted=()), "out", change_arguments(conv_states=forget)),
    "block, another's final state": (BLOCK, "final_ssm_states", change_results(keep, shift, keep)),
    "block, another's final state of the convolution": (BLOCK, "final_conv_states", change_results(keep, keep, shift)),
    "block, no gradient of states": (
        replace(BLOCK, wanted=("ssm_states",)), "dssm_states", change_arguments(initial_states=torch.detach)),
    "block, another's state in the cache": (CACHED, "cached_ssm_states", change_results(keep, shift, keep))}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault, in_torch, monkeypatch):
    config, result, wrap = FAULTS[fault]
    module, name = (conv1d, "_convolve_documents") if type(config) is conv1d_documents.Config else (mamba2, "split_conv1d_scan")
    assert trial.run(config, "cpu").status == "passed"
    monkeypatch.setattr(module, name, wrap(getattr(module, name)))
    outcome = trial.run(config, "cpu")
    assert outcome.failed and outcome.why.startswith(result), outcome.why
