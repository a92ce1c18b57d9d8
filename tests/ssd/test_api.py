"""The public function: what it returns, and how it behaves inside torch."""

import logging
import sys
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import ssd
from ssd import reference, registry
from ssd.registry import get_variant
from ssd.runtime import custom_ops as ops
from ssd.variants import VARIANTS
from tests.errors import assert_all_accurate, truths
from tests.inputs import EVERYTHING, HALF, OURS, Case, Shape, arguments, gradients, leaves, random_inputs, random_like

SHAPE = Shape(2, 40, 4, 16, 2, 16, 16)
ROW = replace(SHAPE, batch=1)
RUNNABLE = ("torch", *OURS)


def run(inputs, **options):
    return ssd.ssd_chunk_scan(**arguments(inputs) | options)


def run_both(inputs, **options):
    """out and final_states."""
    return run(inputs, return_final_states=True, **options)[:2]


def backward(inputs, variant="torch", call=run_both):
    """Outputs and gradients of a whole pass, by name, as the variant interface names them."""
    out, final_states = call(inputs, variant=variant)
    ways = random_like(out, "out"), random_like(final_states, "final_states")
    torch.autograd.backward((out, final_states), ways)
    grads = {f"d{name}": grad for name, grad in gradients(inputs).items()}
    return {"out": out.detach(), "final_states": final_states.detach()} | grads, ways


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("dtype, case", [
    (HALF, Case(D="h", z=True, dt_bias=True, dt_softplus=True, initial_states=True)),
    (HALF, Case(D="hp", dt_dtype=torch.float32, BC_dtype=torch.float32)),
    (torch.float32, Case(D="hp", dt_dtype=HALF, BC_dtype=HALF, z=True)),
], ids=str)
def test_dtypes_of_results(variant, dtype, case, device):
    """out has that of x, states are fp32, every gradient has that of its input; mixed inputs are right, too."""
    inputs = random_inputs(ROW, case, dtype, device)
    parameters = {name: getattr(inputs, name) for name in ("A", "D", "dt_bias") if getattr(inputs, name) is not None}
    inputs = leaves(replace(inputs, **{name: t.to(HALF) for name, t in parameters.items()}))
    got, ways = backward(inputs, variant)
    assert got["out"].dtype == dtype and got["final_states"].dtype == torch.float32
    assert {name: grad.dtype for name, grad in gradients(inputs).items()} == {
        name: getattr(inputs, name).dtype for name in gradients(inputs)}
    with torch.no_grad():
        assert_all_accurate(got, truths(inputs, *ways), inputs, *ways)


@pytest.mark.parametrize("variant", RUNNABLE)
def test_strides_of_inputs_and_gradients(variant, device):
    """Slices of one projection, every second element, strides of 0, transposed axes: as their contiguous copies."""
    case = Case(packed=True, z=True, D="hp", dt_bias=True, dt_softplus=True, initial_states=True)
    inputs = random_inputs(SHAPE, case, torch.float32, device)
    assert not inputs.x.is_contiguous()
    strided = leaves(replace(
        inputs, x=inputs.x.transpose(1, 3).contiguous().transpose(1, 3), A=inputs.A[:1].expand(4),
        B=inputs.B[:, :, :1].expand_as(inputs.B), D=inputs.D.t().contiguous().t(),
        dt_bias=inputs.dt_bias.repeat_interleave(2)[::2], initial_states=inputs.initial_states.mT.contiguous().mT,
    ))
    plain = leaves(replace(strided, **{name: t.detach().contiguous() for name, t in vars(strided).items()
                                       if isinstance(t, torch.Tensor)}))
    for given in (strided, plain):
        out, final_states = run_both(given, variant=variant)
        (out.sum() + final_states.sum()).backward()  # their gradients are one number, expanded
    assert_close(gradients(strided), gradients(plain), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", RUNNABLE)
def test_what_is_returned(variant, device):
    inputs = random_inputs(ROW, replace(EVERYTHING, documents="varlen"), torch.float32, device)
    ndocs = len(inputs.cu_seqlens) - 1
    state = (4, 16, 16)
    out = run(inputs, variant=variant, return_varlen_states=False)
    both = run(inputs, variant=variant, return_varlen_states=True)
    three = run(inputs, variant=variant, return_varlen_states=True, return_final_states=True)
    assert isinstance(out, torch.Tensor) and out.shape == inputs.x.shape
    assert [t.shape for t in both] == [out.shape, (ndocs, *state)]
    assert [t.shape for t in three] == [out.shape, (1, *state), (ndocs, *state)]
    assert_close(three[1][0], three[2][-1], rtol=1e-4, atol=1e-5)
    assert not three[2].requires_grad


def test_only_asked_for_gradients_come(device):
    inputs = random_inputs(SHAPE, EVERYTHING, torch.float32, device)
    B = inputs.B.clone().requires_grad_()
    run(replace(inputs, B=B)).square().sum().backward()
    assert B.grad is not None and {*gradients(inputs).values()} == {None}


@pytest.mark.parametrize("ids, canonical", [
    ([0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 2, 2]),  # an id that comes back is another document
    ([5, 5, 5, 2, 2, -1], [1, 1, 1, 2, 2, 3]),  # no leading 0: initial_states reach nothing
    ([0, 0, 3, 3, -1, -1], [0, 0, 1, 1, 2, 2]),  # -1 pads
])
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_documents_are_numbered_by_their_changes(ids, canonical, dtype, device):
    shape = Shape(1, 6, 2, 4, 1, 4, 16)
    inputs = random_inputs(shape, Case(initial_states=True), torch.float32, device)
    given = replace(inputs, seq_idx=torch.tensor([ids], dtype=dtype, device=device))
    known = replace(inputs, seq_idx=torch.tensor([canonical], dtype=torch.int32, device=device))
    out, final_states = run_both(given)
    assert_close((out.double(), final_states.double()), reference.recurrence(known), rtol=1e-5, atol=1e-5)


def test_cu_seqlens_alone_give_the_documents(device):
    """Also where one of them is empty: its state is zero."""
    inputs = random_inputs(Shape(1, 40, 2, 4, 1, 4, 16), Case(D="h"), torch.float32, device)
    ends = torch.tensor([0, 7, 7, 32, 40], device=device)
    out, states = run(inputs, cu_seqlens=ends, return_varlen_states=True)
    seq_idx = torch.tensor([[0] * 7 + [1] * 25 + [2] * 8], device=device)
    assert_close(out, run(inputs, seq_idx=seq_idx))
    assert states[1].abs().max() == 0 and (states[[0, 2, 3]].abs().amax((1, 2, 3)) > 0).all()
    assert_close(out, run(inputs, cu_seqlens=ends))
    every_second = ends.to(torch.int32).repeat_interleave(2)[::2]
    assert_close(run(inputs, cu_seqlens=every_second, return_varlen_states=True, variant=OURS[0])[1], states)


def watch_forward(variant, runs, watch, monkeypatch):
    """The variant's forward becomes that of `runs`; watch(options, saved) after each."""
    run_forward = get_variant(runs).forward

    def forward(inputs, options, save):
        results = run_forward(inputs, options, save)
        watch(options, results[2])
        return results

    module = registry.import_module(VARIANTS[variant].module)
    monkeypatch.setattr(module, "VARIANT", replace(module.VARIANT, forward=forward))


@pytest.mark.parametrize("variant", OURS)
def test_options_reach_the_kernels(variant, device, monkeypatch):
    seen = []
    watch_forward(variant, "torch", lambda options, saved: seen.append(options), monkeypatch)
    options = ssd.Options(tf32=True)
    run(random_inputs(SHAPE, Case(), torch.float32, device), variant=variant, options=options)
    assert seen == [options] and options != ssd.Options()


def test_auto_says_what_it_runs_and_once(device, caplog):
    inputs = random_inputs(SHAPE, Case(), HALF, device)
    registry._say.cache_clear()
    with caplog.at_level(logging.INFO, "ssd"):
        out = run(inputs, variant="auto")
        run(inputs, variant="auto")
    (said,) = [record for record in caplog.records if record.module == "registry"]
    assert device == "cuda" or said.getMessage() == "variant 'auto' runs 'torch' (fwd): tensors are on the CPU"
    assert said.args[0] in (registry.list_candidates() if device == "cuda" else ["torch"])
    assert torch.equal(out, run(inputs, variant=said.args[0]))


def test_watchers_see_one_op(device):
    """Modes, transforms and subclasses are shown the op; plain tensors go straight to the variant."""
    inputs = random_inputs(SHAPE, Case(), torch.float32, device)
    tensors = (inputs.x, None)
    assert ops.are_plain(tensors) and ops.are_plain((torch.nn.Parameter(inputs.x),))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert not ops.are_plain(tensors)
        assert run(inputs).shape == inputs.x.shape
    graph = make_fx(lambda x: run(replace(inputs, x=x)))(inputs.x).graph
    assert torch.ops.ssd.chunk_scan.default in {node.target for node in graph.nodes}
    assert not ops.are_plain((torch.complex(inputs.x, inputs.x).conj().imag,))
    assert not ops.are_plain((inputs.x.as_subclass(Subclass),))
    assert torch.equal(run(replace(inputs, x=inputs.x.as_subclass(Subclass))).as_subclass(torch.Tensor), run(inputs))


class Subclass(torch.Tensor):
    pass


def test_gradcheck():
    """Finite differences in fp64, independent of every derivation."""
    inputs = leaves(reference.as_dtype(random_inputs(Shape(1, 18, 2, 2, 1, 2, 16), EVERYTHING), torch.float64))
    names = list(gradients(inputs))

    def call(*tensors):
        return run_both(replace(inputs, **dict(zip(names, tensors, strict=True))), variant="torch")

    assert torch.autograd.gradcheck(call, [getattr(inputs, name) for name in names])


@pytest.mark.parametrize("dtype", (torch.float32, HALF), ids=str)
@pytest.mark.parametrize("variant", RUNNABLE)
def test_gates_that_are_nothing(variant, dtype, device):
    """dz where z is 0, or so small or so far below 0 that the output has nothing of what it was multiplied with."""
    inputs = random_inputs(ROW, EVERYTHING, dtype, device)
    inputs.z[:, ::2, :, :4] = torch.tensor([0.0, -0.0, 1e-30, -1000.0], dtype=dtype, device=device)
    got, ways = backward(leaves(inputs), variant)
    with torch.no_grad():
        expected = truths(inputs, *ways)
        assert_all_accurate(got, expected, inputs, *ways)
        small, far = got["dz"][:, ::2, :, :3], got["dz"][:, ::2, :, 3]
        assert_close(small.double(), expected["dz"][:, ::2, :, :3].double(), rtol=0.1, atol=0.02)
        assert (small != 0).float().mean() > 0.9 and not far.any()


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("variant", RUNNABLE)
def test_nothing_is_kept_without_a_gradient(variant, dtype, device, monkeypatch):
    """y, of fp16, and prev_states, which only a backward reads, under no_grad and where nothing requires a gradient."""
    kept = []
    keeps_states = variant != "torch"
    watch_forward(variant, variant, lambda options, saved: kept.append(
        (saved.y is not None, saved.prev_states is not None)), monkeypatch)
    inputs, keeps_y = random_inputs(ROW, EVERYTHING, dtype, device), dtype == torch.float16
    assert run(leaves(inputs), variant=variant).requires_grad
    run(leaves(inputs), variant=variant, options=ssd.Options(save_states=False))
    run(inputs, variant=variant)
    with torch.no_grad():
        assert not run(leaves(inputs), variant=variant).requires_grad
    assert kept == [(keeps_y, keeps_states), (keeps_y, False), (False, False), (False, False)]


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("state_dtype", (None, torch.float32))
def test_kept_states_change_no_gradient(variant, state_dtype, device):
    inputs = random_inputs(ROW, replace(EVERYTHING, state_dtype=state_dtype), HALF, device)
    on, off = (backward(leaves(inputs), variant, partial(run_both, options=ssd.Options(save_states=kept)))[0]
               for kept in (True, False))
    assert on.keys() == off.keys() and all(torch.equal(on[name], off[name]) for name in on)


@pytest.mark.parametrize("variant", [name for name in RUNNABLE if name in OURS])
@pytest.mark.parametrize("options", [ssd.Options(), ssd.Options(low_precision_states=False)], ids=("C", "fp32"))
def test_states_that_are_kept(variant, options, device):
    """By the op: the state before each chunk, of which the first is the initial one."""
    inputs = leaves(random_inputs(SHAPE, Case(initial_states=True), HALF, device))
    out = run(inputs, variant=variant, options=options)  # held: a graph whose output is gone may free what it saved
    *_, prev_states = out.grad_fn.saved_tensors
    assert prev_states.shape == (2, 3, 4, 16, 16)
    assert prev_states.dtype == (HALF if options.low_precision_states else torch.float32)
    assert_close(prev_states[:, 0], inputs.initial_states.detach().to(prev_states.dtype))


def test_a_variant_that_another_thread_imports_is_waited_for(monkeypatch):
    """import_module waits; sys.modules already has the module, without what is at its end."""
    module = VARIANTS["torch"].module
    monkeypatch.setitem(sys.modules, module, ModuleType(module))
    monkeypatch.setattr(registry, "import_module", lambda name: SimpleNamespace(VARIANT=name))
    assert registry.get_variant("torch") == module
