"""How every function behaves inside torch: traced, captured, computed again, under autocast, without a gradient."""

from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ssd import get_variant, registry, ssd_chunk_scan
from ssd.block import gated_norm, selective_scan, state_update
from ssd.runtime.custom_ops import DifferentiableOp
from tests.block import test_conv1d, test_gated_norm, test_selective_scan
from tests.block.calls import assert_same_bits, convert_to_fp64, run
from tests.functions import BLOCK, FUNCTIONS, MORE_CALLS, TRACED, UPDATES, VARIANTS, Function, convolution, norm, over
from tests.inputs import GPU, HALF
from tests.refused import assert_refused

pytestmark = pytest.mark.usefixtures("poison")
BACKEND = "inductor" if GPU else "aot_eager"


def first_output(function: Function, given: dict) -> torch.Tensor:
    outs = function.call(**given)
    return outs[0] if isinstance(outs, tuple) else outs


@pytest.mark.parametrize("dynamic", (None, True))
@over({name: function for name, function in TRACED.items() if name != "selective_scan"})
def test_one_graph_forward_and_backward_for_a_second_length_as_well(function, dynamic, device):
    """That of selective_scan counts graphs, in a test of its own."""
    torch._dynamo.reset()  # the limit on recompilations counts those of every other function
    compiled = torch.compile(function.call, fullgraph=True, backend=BACKEND, dynamic=dynamic)
    for tokens in (5, 20):
        given = function.inputs(tokens, device, torch.float32)
        eager, ways = function.results(given)
        assert_close(function.results(given, compiled, ways)[0], eager)


@pytest.mark.parametrize("dynamic", (None, True))
@over(UPDATES)
def test_a_graph_sees_that_an_update_changes_the_state(function, dynamic, device):
    """Also where it is read again."""
    torch._dynamo.reset()

    def step(**given):
        before = given[function.state].sum()
        return function.call(**given), before, given[function.state].sum()

    compiled = torch.compile(step, fullgraph=True, backend=BACKEND, dynamic=dynamic)
    for tokens in (3, 5):
        given = function.inputs(tokens, device, torch.float32)
        got, expected = function.results(given, compiled)[0], function.results(given, step)[0]
        assert_close(got, expected)
        assert not torch.equal(got["state"], given[function.state])


class Calls(TorchDispatchMode):
    """Our ops that are called, with what; a state that is changed as it was."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace != "ssd":
            return op(*args, **(kwargs or {}))
        self.seen.append((op, [t.detach().clone(memory_format=torch.preserve_format) if isinstance(t, torch.Tensor) else t
                               for t in args]))
        results = op(*args, **(kwargs or {}))
        for t in results if isinstance(results, (tuple, list)) else (results,):
            assert not t.storage_offset(), f"{op}: what torch.compile makes of it expects results on 16 bytes"
        return results


OTHER_VARIANTS = [function for name, function in MORE_CALLS.items() if name.endswith((", fused", ", persistent", ", torch"))]


@over(BLOCK | UPDATES | MORE_CALLS)
def test_opcheck(function, device):
    """Every op that is called, forward and backward: results have the strides that a graph expects, whatever inputs have.

    That torch traces an op is shown once for all variants: to it they are a setting.
    """
    checks = {"test_utils": ("test_schema", "test_faketensor")} if function in OTHER_VARIANTS else {}
    given = {name: t.detach().mT.contiguous().mT.requires_grad_(t.requires_grad)
             if isinstance(t, torch.Tensor) and t.dim() > 1 else t
             for name, t in function.inputs(5, device, torch.float32).items()}
    with Calls() as calls, torch.autograd.set_multithreading_enabled(False):
        function.results(given)
    backward = [op.name().endswith("_bwd") for op, _ in calls.seen]
    assert len(backward) >= 1 and any(backward) == (not function.state)
    for (op, args), is_backward in zip(calls.seen, backward, strict=True):
        for t in args:
            if isinstance(t, torch.Tensor) and t.is_floating_point() and not function.state and not is_backward:
                t.requires_grad_()
        torch.library.opcheck(op, tuple(args), **checks)


@over(TRACED | UPDATES)
def test_launches_are_not_traced_where_torch_compile_left_the_caller_out(function, device, monkeypatch):
    """Once it has given a function up, it goes on with those that this one calls."""
    torch._dynamo.reset()
    leave_out = partial(torch.compiler.disable, recursive=False)
    monkeypatch.setattr(DifferentiableOp, "__call__", leave_out(DifferentiableOp.__call__))
    given = function.inputs(5, device, torch.float32)
    plain, ways = function.results(given)
    compiled = torch.compile(leave_out(function.call) if function.state else function.call, backend="eager")
    assert_same_bits(function.results(given, compiled, ways)[0], plain)


@over(TRACED)
@pytest.mark.parametrize("use_reentrant", (False, True))
def test_a_checkpoint_gives_the_same_bits_as_does_every_run(function, use_reentrant, device):
    given, first = function.inputs(5, device, HALF), function.leaves[0]

    def run_checkpointed(**arguments):
        x = arguments.pop(first)
        return checkpoint(lambda x: function.call(**{first: x}, **arguments), x, use_reentrant=use_reentrant)

    plain, ways = function.results(given)
    assert_same_bits(function.results(given, run_checkpointed, ways)[0], plain)
    assert_same_bits(function.results(given, ways=ways)[0], plain)


@over(TRACED | UPDATES)
@pytest.mark.parametrize("dtype", (torch.float32, HALF), ids=str)
def test_autocast_changes_nothing(function, dtype, device):
    """What a projection hands over in half precision stays it, fp32 stays fp32."""
    given = function.inputs(5, device, dtype)
    plain, ways = function.results(given)
    with torch.autocast(device, HALF):
        got, _ = function.results(given, ways=ways)
    assert_same_bits(got, plain)
    assert got["out"].dtype == dtype


@over(FUNCTIONS)
def test_a_graph_only_where_a_gradient_is_wanted_and_of_the_first_order(function, device):
    """A gradient of a gradient must not come out short without a word."""
    given = function.inputs(5, device, torch.float32)
    assert first_output(function, given).grad_fn is None
    parameter = given[function.leaves[2]].requires_grad_()
    with torch.no_grad():
        assert first_output(function, given).grad_fn is None
    for loss in (torch.sum, lambda out: out.square().sum()):  # torch's own guard leaves out the first
        (gradient,) = torch.autograd.grad(loss(first_output(function, given)), parameter, create_graph=True)
        (again,) = torch.autograd.grad(loss(checkpoint(first_output, function, given, use_reentrant=False)), parameter,
                                       create_graph=True)  # which lets what was saved be read once
        assert torch.equal(again, gradient)
        gradient.mul_(2)  # nor is it a view of another
        with pytest.raises(RuntimeError, match="second derivatives: got"):  # asked for by name, as torch's hessian asks
            torch.autograd.grad(gradient.sum(), parameter, retain_graph=True)
        with pytest.raises(RuntimeError, match="second derivatives: got"):
            gradient.sum().backward()


@over(TRACED)
def test_what_was_traced_without_a_gradient_has_one(function, device):
    """torch.export does so under no_grad: what a backward needs is kept by who runs the trace, not by who traced."""
    given, (leaf, *_) = function.inputs(5, device, torch.float32), function.leaves
    plain, ways = function.results(given)
    trace = make_fx(lambda t: function.call(**given | {leaf: t}))(given[leaf])
    got, _ = run(lambda **arguments: trace(arguments[leaf]), given, (leaf,), function.named, ways)
    assert_same_bits(got, {name: plain[name] for name in got})


@over(TRACED)
def test_gradients_of_several_ways_at_once(function, device):
    given, (leaf, *_) = function.inputs(5, device, torch.float32), function.leaves
    given[leaf].requires_grad_()
    out = first_output(function, given)
    ways = torch.randn(3, *out.shape, device=device)
    (batched,) = torch.autograd.grad(out, given[leaf], ways, is_grads_batched=True, retain_graph=True)
    for way, gradient in zip(ways, batched, strict=True):
        assert torch.equal(torch.autograd.grad(out, given[leaf], way, retain_graph=True)[0], gradient)


def test_a_variant_of_the_users_gives_what_its_op_is_declared_to(device, monkeypatch):
    """Else a graph of torch.compile reads it by another dtype or other strides."""
    torch_variant = get_variant("torch")

    def turn(t):
        return None if t is None else t.double().mT.contiguous().mT if t.dim() > 1 else t.double()

    def forward(*args):
        out, final_states, saved = torch_variant.forward(*args)
        return turn(out), turn(final_states), saved

    def backward(*args):
        gradients = torch_variant.backward(*args)
        return replace(gradients, **{f.name: turn(getattr(gradients, f.name)) for f in fields(gradients)})

    monkeypatch.setattr(registry, "_ADDED", {})
    registry.add_variant(registry.Variant("own", supports=torch_variant.supports, forward=forward, backward=backward))
    function = VARIANTS["scan, torch"]
    given = function.inputs(5, device, torch.float32)
    expected, ways = function.results(given)
    with Calls() as calls, torch.autograd.set_multithreading_enabled(False):
        assert_close(function.results(given, partial(ssd_chunk_scan, variant="own"), ways)[0], expected)
    assert len(calls.seen) >= 2
    for op, args in calls.seen:
        torch.library.opcheck(op, tuple(args), test_utils="test_faketensor")


@pytest.mark.parametrize(("name", "argument"), [
    (name, leaf) for name, function in UPDATES.items() for leaf in function.leaves if leaf != function.state])
def test_a_gradient_of_an_update_is_refused(name, argument, device):
    """When it is asked for, not before: parameters require one in every call without no_grad."""
    function = UPDATES[name]
    given = function.inputs(3, device, torch.float32)
    expected, _ = function.results(given)
    given[argument] = given[argument].clone().requires_grad_()
    assert not function.results(given)[0]["out"].requires_grad
    out = function.call(**given)
    assert torch.equal(out, expected["out"]) and torch.equal(given[function.state], expected["state"])
    assert not given[function.state].requires_grad
    with pytest.raises(RuntimeError, match="has no gradient"):
        out.sum().backward()


@over(UPDATES)
def test_a_state_whose_rows_share_memory_is_refused(function, device):
    given = function.inputs(3, device, torch.float32)
    given[function.state] = given[function.state][:1].expand(given[function.state].shape)
    assert_refused(function.call, given, function.state, ValueError, "a stride of 0 along axis 0", "a place for each")


@over(UPDATES)
def test_a_state_counts_as_changed(function, device):
    """Autograd refuses a backward through what the update has overwritten; inference mode has nothing to refuse."""
    given = function.inputs(3, device, torch.float32)
    product = (given[function.state] * torch.ones((), device=device, requires_grad=True)).sum()
    function.call(**given)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        assert function.call(**function.inputs(3, device, torch.float32)).is_inference()


NAN = [(name, leaf) for name, function in (FUNCTIONS | UPDATES).items() for leaf in (function.state, *function.leaves)
       if leaf and (name in ("gated_norm", "state_update") or leaf not in ("D", "z", "delta_bias", "dt_bias"))]


@pytest.mark.parametrize(("name", "argument"), NAN)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_nan_is_not_hidden(name, argument, device):
    """A model that has diverged must show it."""
    function = (FUNCTIONS | UPDATES)[name]
    given = function.inputs(5, device, torch.float32)
    given |= {"dt_limit": (0.0, float("inf")), "seq_idx": None} if name in VARIANTS else {}
    given[argument] = given[argument].clone(memory_format=torch.contiguous_format)
    given[argument].view(-1)[0] = float("nan")
    got = function.results(given)[0] if function.state else {"out": first_output(function, given)}
    assert got["out"].isnan().any() and not got["out"].isnan().all()
    assert not function.state or got["state"].isnan().any() or argument in ("C", "D", "z", "weight", "bias")


def set_apart(t: torch.Tensor, axis: int) -> torch.Tensor:
    """The same values, 2^30 elements apart along an axis; no more memory than they are in is touched."""
    memory = torch.UntypedStorage(t.itemsize * t.shape[axis] * 2**30, device=t.device)
    first = t.movedim(axis, 0).contiguous()
    far = torch.tensor([], dtype=t.dtype, device=t.device).set_(memory, 0, first.shape, (2**30, *first.stride()[1:]))
    return far.copy_(first).movedim(0, axis)


@pytest.mark.parametrize(("name", "argument", "axis"), [("conv1d", "x", 2), ("gated_norm", "x", 1), ("gated_norm", "z", 1)])
def test_offsets_beyond_int32(name, argument, axis, device):
    given = FUNCTIONS[name].inputs(3, device, HALF)
    plain, ways = FUNCTIONS[name].results(given)
    far = given | {argument: set_apart(given[argument], axis)}
    assert_same_bits(FUNCTIONS[name].results(far, ways=ways)[0], plain)


@pytest.mark.gpu
@over(FUNCTIONS | UPDATES)
def test_cuda_graph(function, device):
    """Captured once, forward and backward, and replayed on other numbers."""
    given = function.inputs(64, device, HALF)
    _, ways = function.results(given)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            function.results(given, ways=ways)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = function.results(given, ways=ways)
    given[function.leaves[0]].copy_(torch.randn_like(given[function.leaves[0]]))
    graph.replay()
    assert_same_bits(captured, function.results(given, ways=ways)[0])


@pytest.mark.gpu(count=2)
@over(FUNCTIONS | UPDATES)
def test_second_device(function):
    """While another device is current: the same bits."""
    here = function.inputs(64, "cuda:0", HALF)
    there = {name: t.to("cuda:1") if isinstance(t, torch.Tensor) else t for name, t in here.items()}
    first, ways = function.results(here)
    second, _ = function.results(there, ways=tuple(way.to("cuda:1") for way in ways))
    assert all(t.device.index == 1 for t in second.values())
    assert_same_bits({name: t.cpu() for name, t in second.items()}, {name: t.cpu() for name, t in first.items()})


@pytest.mark.parametrize(("function", "tokens", "form", "definition"), [
    *((convolution(replace(case, dim=3)), 9, test_conv1d.mirror, test_conv1d.definition) for case in (
        test_conv1d.CONTINUED, replace(test_conv1d.EVERYTHING, documents=(2, 1, 3, -1, 4)))),
    *((norm(gate), 2, gated_norm.compute_in_torch, test_gated_norm.definition) for gate in ("none", "before", "after")),
    (BLOCK["selective_scan"], 5, selective_scan.selective_scan_fn, test_selective_scan.definition),
], ids=("conv1d", "conv1d of documents", "norm", "norm before gate", "norm after gate", "selective_scan"))
def test_torch_form(function, tokens, form, definition):
    """What CPU tensors and fp64 take: the definition in fp64, and its gradients against finite differences."""
    given = convert_to_fp64(function.inputs(tokens, "cpu", torch.float32), function.leaves)
    assert_close(form(**given), definition(**given), rtol=1e-12, atol=1e-12)
    names = [leaf for leaf in function.leaves if given[leaf] is not None]
    tensors = [given[leaf].contiguous().requires_grad_() for leaf in names]

    def call(*tensors):
        return function.call(**given | dict(zip(names, tensors, strict=True)))

    assert torch.autograd.gradcheck(call, tensors)
    assert function is BLOCK["selective_scan"] or torch.autograd.gradgradcheck(call, tensors)


@pytest.mark.parametrize(("module", "function"), [
    (gated_norm, BLOCK["gated_norm"]), (state_update, UPDATES["state_update"])])
def test_without_an_interpreter_cpu_tensors_take_the_torch_form(module, function, monkeypatch):
    """bf16 among them; by itself, and traced."""
    monkeypatch.setattr("ssd.block.arguments.INTERPRETED", False)
    monkeypatch.setattr(module, module.__name__.rpartition(".")[2], lambda *args: pytest.fail("a kernel was launched"))
    torch._dynamo.reset()
    for call in (function.call, torch.compile(function.call, fullgraph=True, backend="aot_eager")):
        expected, got = (run(**function.inputs(3, "cpu", torch.bfloat16)) for run in (module.compute_in_torch, call))
        assert torch.equal(got, expected)


@pytest.mark.skipif(GPU, reason="nothing is interpreted here")
@over({name: function for name, function in (BLOCK | UPDATES).items() if name in ("conv1d", "gated_norm", "state_update")})
def test_bf16_is_refused_by_the_interpreter(function):
    given = function.inputs(5, "cpu", torch.float32)
    for name in (function.state, *function.leaves):
        if name:
            assert_refused(function.call, given | {name: given[name].bfloat16()}, name, TypeError, "torch.bfloat16",
                           "TRITON_INTERPRET=1")
