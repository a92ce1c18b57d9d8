"""Every public function of the operator and of the block, and how it is called: for tests of what holds for all."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch

from ssd import ssd_chunk_scan
from ssd.block import conv1d, conv1d_update, gated_norm, selective_scan, state_update
from ssd.block.split_conv1d_scan import split_conv1d_scan
from tests.block import test_conv1d, test_conv1d_update, test_gated_norm, test_selective_scan, test_state_update
from tests.block.calls import move, run
from tests.inputs import DIFFERENTIABLE, EVERYTHING, GPU, OURS, PLAIN, Shape, arguments, random_inputs
from tests.interop import test_split


class Function(NamedTuple):
    """A public function, and its arguments: of so many tokens, on a device, in a dtype. state: the one that it changes."""

    call: Callable
    inputs: Callable[[int, str, torch.dtype], dict]
    leaves: tuple[str, ...]
    named: tuple[str, ...] = ("out",)
    state: str | None = None

    def results(self, given: dict, call: Callable | None = None, ways=None) -> tuple[dict, tuple]:
        """Outputs and gradients by name, or out and the new state; and the cotangents."""
        call = call or self.call
        if self.state is None:
            return run(call, given, self.leaves, self.named, ways)
        state = given[self.state].clone()
        with torch.no_grad():
            return {"out": call(**given | {self.state: state}), "state": state}, ()


def scan(variant, case=EVERYTHING):
    def inputs(tokens, device, dtype):
        batch = 1 if case.documents in ("varlen", "states") else 2
        i = random_inputs(Shape(batch, tokens, 2, 8, 1, 16, 16), case, dtype, device)
        return arguments(i) | {"return_final_states": True}

    return Function(partial(ssd_chunk_scan, variant=variant), inputs, DIFFERENTIABLE, ("out", "final_states"))


def convolution(case=test_conv1d.CONTINUED):
    return Function(conv1d.causal_conv1d_fn, lambda tokens, device, dtype: test_conv1d.inputs(
        replace(case, seqlen=tokens, dtype=dtype), device), test_conv1d.LEAVES, ("out", "final_states"))


def norm(gate="after", bias=True):
    return Function(gated_norm.rms_norm_gated, lambda tokens, device, dtype: test_gated_norm.name_arguments(
        test_gated_norm.inputs((2, tokens), 24, gate, bias, dtype, device), 12, gate), test_gated_norm.NAMES)


def scan_of_mamba_1(**sizes):
    case = test_selective_scan.Case(**{"dim": 2, "dstate": 2} | sizes)
    return Function(selective_scan.selective_scan_fn, lambda tokens, device, dtype: test_selective_scan.inputs(
        replace(case, seqlen=tokens, dtype=dtype), device), test_selective_scan.LEAVES, ("out", "last_state"))


def middle():
    """What lies between the projections of a block of Mamba-2, in one op."""
    leaves = ("zxbcdt", "conv1d_weight", "conv1d_bias", "dt_bias", "A", "D", "rmsnorm_weight", "initial_states", "conv_states")
    return Function(partial(split_conv1d_scan, variant="fused"), lambda tokens, device, dtype: move(test_split.draw_arguments(
        outproj=False, outproj_bias=False, initial_states=True, conv_states=True, final=True, return_conv_states=True,
        seqlen=tokens), device, dtype), leaves, ("out", "final_states", "conv_states"))


VARIANTS = {f"scan, {variant}": scan(variant) for variant in (*OURS, "torch")}
BLOCK = {"conv1d": convolution(), "gated_norm": norm(), "selective_scan": scan_of_mamba_1(),
         "middle": middle()}
UPDATES = {
    "conv1d_update": Function(
        conv1d_update.causal_conv1d_update, lambda tokens, device, dtype: test_conv1d_update.inputs(
            None, 1, True, True, device, dtype=dtype), ("x", "weight", "bias"), state="conv_state"),
    "state_update": Function(
        state_update.selective_state_update, lambda tokens, device, dtype: test_state_update.inputs(
            (tokens, 4, 2, 10, 20), indexed=True, dtype=dtype, device=device), test_state_update.NAMES, state="state"),
}
FUNCTIONS = {**VARIANTS, **BLOCK}
# To torch a variant is a name: without a GPU two of them stand for all where nothing but the op matters.
TRACED = {name: function for name, function in FUNCTIONS.items() if GPU or name not in ("scan, baseline", "scan, persistent")}
MORE_CALLS = {  # of other ops, or of other forms of their arguments
    **{f"scan of documents, {variant}": scan(variant, replace(EVERYTHING, documents="varlen", state_dtype=torch.float32))
       for variant in (*OURS, "torch")},
    "scan of documents with states": scan("baseline", replace(EVERYTHING, documents="states")),
    **{f"plain scan, {variant}": scan(variant, PLAIN) for variant in (*OURS, "torch")},
    "conv1d of documents": convolution(test_conv1d.EVERYTHING),
    **{f"norm, gate {gate}, bias {bias}": norm(gate, bias) for gate, bias in test_gated_norm.SETTINGS},
    "selective_scan without options": scan_of_mamba_1(options=(), ngroups=0),
    **({"selective_scan that walks": scan_of_mamba_1(batch=16, dim=32, dstate=1)} if GPU else {}),
    "conv1d_update of rows": UPDATES["conv1d_update"]._replace(
        inputs=lambda tokens, device, dtype: test_conv1d_update.inputs(2, 1, False, False, device)),
    "state_update of rows": UPDATES["state_update"]._replace(
        inputs=lambda tokens, device, dtype: test_state_update.inputs(device=device)),
}


def over(functions: dict[str, Function]):
    return pytest.mark.parametrize("function", functions.values(), ids=functions)
