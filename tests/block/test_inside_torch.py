"""How the block's functions behave inside torch: traced, computed again, under autocast, where nothing asks for a gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from ssd.block import conv1d, gated_norm, selective_scan, state_update
from tests.block import test_conv1d, test_gated_norm, test_selective_scan, test_state_update
from tests.block.calls import assert_same_bits, run
from tests.refused import assert_refused

pytestmark = pytest.mark.usefixtures("poison")
GPU = torch.cuda.is_available()
HALF = torch.bfloat16 if GPU else torch.float16


class Function(NamedTuple):
    call: Callable
    inputs: Callable[[int, str, torch.dtype], dict]  # of so many tokens, on a device, in a dtype
    leaves: tuple[str, ...]
    named: tuple[str, ...]


def _conv1d(tokens, device, dtype):
    return test_conv1d.inputs(replace(test_conv1d.CONTINUED, seqlen=tokens, dtype=dtype), device)


def _gated_norm(tokens, device, dtype):
    return test_gated_norm.named(test_gated_norm.inputs((2, tokens), 24, "after", True, dtype, device), 12, "after")


def _selective_scan(tokens, device, dtype):
    return test_selective_scan.inputs(test_selective_scan.Case(dim=2, dstate=2, seqlen=tokens, dtype=dtype), device)


FUNCTIONS = {
    "conv1d": Function(conv1d.causal_conv1d_fn, _conv1d, test_conv1d.LEAVES, ("out", "final_states")),
    "gated_norm": Function(gated_norm.rms_norm_gated, _gated_norm, test_gated_norm.NAMES, ("out",)),
    "selective_scan": Function(selective_scan.selective_scan_fn, _selective_scan, test_selective_scan.LEAVES,
                               ("out", "last_state")),
}
over_functions = pytest.mark.parametrize("name", FUNCTIONS)


def results(function: Function, given: dict, call: Callable | None = None, ways=None):
    return run(call or function.call, given, function.leaves, function.named, ways)


@pytest.mark.parametrize("dynamic", (None, True))
@pytest.mark.parametrize("name", ("conv1d", "gated_norm"))
def test_one_graph_forward_and_backward_for_a_second_length_as_well(name, dynamic, device):
    function = FUNCTIONS[name]
    torch._dynamo.reset()
    compiled = torch.compile(function.call, fullgraph=True, backend="inductor" if GPU else "aot_eager", dynamic=dynamic)
    for tokens in (5, 8):
        given = function.inputs(tokens, device, torch.float32)
        eager, ways = results(function, given)
        assert_close(results(function, given, compiled, ways)[0], eager)


@over_functions
@pytest.mark.parametrize("use_reentrant", (False, True))
def test_a_checkpoint_gives_the_same_bits_as_does_every_run(name, use_reentrant, device):
    function = FUNCTIONS[name]
    given, first = function.inputs(5, device, HALF), function.leaves[0]

    def recomputed(**arguments):
        x = arguments.pop(first)
        return checkpoint(lambda x: function.call(**{first: x}, **arguments), x, use_reentrant=use_reentrant)

    plain, ways = results(function, given)
    assert_same_bits(results(function, given, recomputed, ways)[0], plain)
    assert_same_bits(results(function, given, ways=ways)[0], plain)


@over_functions
@pytest.mark.parametrize("dtype", (torch.float32, HALF), ids=str)
def test_autocast_changes_nothing(name, dtype, device):
    """What a projection hands over in half precision stays it, fp32 stays fp32."""
    function = FUNCTIONS[name]
    given = function.inputs(5, device, dtype)
    plain, ways = results(function, given)
    with torch.autocast(device, HALF):
        got, _ = results(function, given, ways=ways)
    assert_same_bits(got, plain)
    assert got["out"].dtype == dtype


@over_functions
def test_a_graph_only_where_a_gradient_is_wanted_and_of_the_first_order(name, device):
    function = FUNCTIONS[name]
    given = function.inputs(5, device, torch.float32)

    def out() -> torch.Tensor:
        outs = function.call(**given)
        return outs[0] if isinstance(outs, tuple) else outs

    assert out().grad_fn is None
    parameter = given[function.leaves[2]].requires_grad_()
    with torch.no_grad():
        assert out().grad_fn is None
    (gradient,) = torch.autograd.grad(out().square().sum(), parameter, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize(("name", "argument"), [(name, leaf) for name, function in FUNCTIONS.items() for leaf in function.leaves
                                                if leaf not in ("D", "z", "delta_bias") or name == "gated_norm"])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_nan_is_not_hidden(name, argument, device):
    function = FUNCTIONS[name]
    given = function.inputs(5, device, torch.float32)
    given[argument] = given[argument].contiguous()
    given[argument].view(-1)[0] = float("nan")
    outs = function.call(**given)
    out = outs[0] if isinstance(outs, tuple) else outs
    assert out.isnan().any() and not out.isnan().all()


@pytest.mark.parametrize("name", test_state_update.NAMES)
def test_nan_is_not_hidden_by_a_step(name, device):
    given = test_state_update.inputs(device=device)
    given[name] = given[name].clone()
    given[name].view(-1)[0] = float("nan")
    out, state = test_state_update.run(given)
    assert out.isnan().any() and (state.isnan().any() or name in ("C", "D", "z"))


@pytest.mark.parametrize("function", (gated_norm.rms_norm_gated, state_update.selective_state_update))
def test_without_an_interpreter_cpu_tensors_take_the_torch_form(function, monkeypatch):
    """bf16 among them; by itself, and traced."""
    monkeypatch.setattr("ssd.block.arguments.INTERPRETED", False)
    for module, kernel in ((gated_norm, "gated_norm"), (state_update, "state_update")):
        monkeypatch.setattr(module, kernel, lambda *args: pytest.fail("a kernel was launched"))
    if function is gated_norm.rms_norm_gated:
        form, given = gated_norm.compute_in_torch, _gated_norm(3, "cpu", torch.bfloat16)
    else:
        form, given = state_update.compute_in_torch, test_state_update.inputs(indexed=True, dtype=torch.bfloat16)

    def fresh() -> dict:
        return {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in given.items()}

    torch._dynamo.reset()
    for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        assert torch.equal(call(**fresh()), form(**fresh()))


@pytest.mark.skipif(GPU, reason="nothing is interpreted here")
@pytest.mark.parametrize(("call", "given", "names"), [
    *((function.call, function.inputs(5, "cpu", torch.float32), function.leaves) for name, function in FUNCTIONS.items()
      if name != "selective_scan"),
    (state_update.selective_state_update, test_state_update.inputs(), test_state_update.NAMES)],
    ids=("conv1d", "gated_norm", "state_update"))
def test_bf16_is_refused_by_the_interpreter(call, given, names):
    for name in names:
        broken = given | {name: given[name].bfloat16()}
        assert_refused(call, broken, name, TypeError, "torch.bfloat16", "TRITON_INTERPRET=1")
