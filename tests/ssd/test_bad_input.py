"""Bad input is refused by name, with what came and what is accepted, and before anything is launched."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ssd
from ssd import api
from ssd.registry import add_variant, config_spaces, get_variant, variant_names
from ssd.runtime import tuning
from ssd.types import Options, SSDInputs
from tests.inputs import EVERYTHING, OURS, Shape, arguments, random_inputs
from tests.refused import assert_refused, over_refusals

SHAPE = Shape(2, 20, 4, 8, 2, 16, 16)


@pytest.fixture
def call(device, monkeypatch):
    """The public function on good arguments but for those given; a launch fails the test."""
    monkeypatch.setattr(api, "chunk_scan", lambda *_, **__: pytest.fail("something was launched"))
    good = arguments(random_inputs(SHAPE, replace(EVERYTHING, D="h"), device=device))
    return lambda **bad: ssd.ssd_chunk_scan(**good | bad)


@over_refusals(Path(__file__).with_name("refused.txt"), "ssd_chunk_scan")
def test_bad_arguments_are_refused_by_name(refusal, call, device):
    moved = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in refusal.changed.items()}
    refusal._replace(changed=moved).check(call, {})


def test_a_limit_that_is_no_number(call):
    assert_refused(call, {"dt_limit": (float("nan"), 1.0)}, "dt_limit", ValueError, "(nan, 1.0)", "0 <= min <= max")


@pytest.mark.parametrize("argument", ["dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states", "seq_idx", "cu_seqlens"])
def test_other_device(call, device, argument):
    """The meta device stands for another one."""
    shape = replace(SHAPE, batch=1 if argument == "cu_seqlens" else 2)
    inputs = random_inputs(shape, replace(EVERYTHING, D="h", documents="varlen"), device=device)
    bad = getattr(inputs, argument).to("meta")
    assert_refused(call, {argument: bad}, argument, ValueError, "a tensor on meta", str(inputs.x.device))


def elsewhere() -> dict:
    """Good arguments on the meta device, which stands for those without kernels."""
    good = arguments(random_inputs(SHAPE))
    return {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in good.items()}


def test_devices_without_kernels(call):
    """The form in torch takes any."""
    for variant in ("auto", "fused"):
        given = elsewhere() | {"variant": variant}
        assert_refused(ssd.ssd_chunk_scan, given, "x", ValueError, "a tensor on meta", "cpu or cuda")
    with pytest.raises(pytest.fail.Exception, match="launched"):
        ssd.ssd_chunk_scan(**elsewhere(), variant="torch")


@over_refusals(Path(__file__).with_name("refused.txt"), "Options")
def test_values_of_options(refusal):
    refusal.check(Options, {})


def test_unknown_variant_lists_the_known_ones():
    with pytest.raises(ValueError) as refused:
        ssd.patch_mamba_ssm("fastest")
    assert all(repr(name) in str(refused.value) for name in (*variant_names(), "auto", "fastest"))
    with pytest.raises(ValueError) as refused:
        get_variant("auto")
    listed = str(refused.value).partition("expected")[2]
    assert all(repr(name) in listed for name in variant_names()) and "auto" not in listed


def test_a_variant_that_is_none_is_refused():
    with pytest.raises(TypeError, match=r"^variant: got str, expected an ssd\.registry\.Variant"):
        add_variant("x")


def test_meta_tensors_have_shapes_alone():
    given = {name: t.to("meta") if isinstance(t, torch.Tensor) else t for name, t in arguments(random_inputs(SHAPE)).items()}
    out = ssd.ssd_chunk_scan(**given, variant="torch")
    assert out.is_meta and out.shape == given["x"].shape


@pytest.mark.parametrize("argument", ("x", "B"))
@pytest.mark.parametrize("layout", (torch.sparse_coo, torch.jagged), ids=str)
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_nested_and_sparse_tensors_are_refused(argument, layout):
    given = arguments(random_inputs(SHAPE, EVERYTHING))
    t = given[argument].detach()
    bad = t.to_sparse() if layout == torch.sparse_coo else torch.nested.as_nested_tensor(list(t.split(1)), layout=layout)
    with pytest.raises(TypeError, match=f"^{argument}: got a tensor of layout {layout}"):
        ssd.ssd_chunk_scan(**given | {argument: bad}, variant="torch")


@pytest.mark.parametrize("variant", OURS)
@pytest.mark.parametrize(("shape", "dtype", "reason"), [
    (replace(SHAPE, headdim=257), torch.float32, "headdim = 257"), (replace(SHAPE, dstate=300), torch.float32, "dstate = 300"),
    (SHAPE, torch.float64, "torch.float64")], ids=str)
def test_unsupported_inputs_are_refused_with_the_reason(variant, shape, dtype, reason, device):
    """The named variant is asked for, so no other one steps in."""
    inputs = random_inputs(shape, dtype=dtype, device=device)
    with pytest.raises(ValueError, match=f"variant '{variant}' cannot run these inputs: .*{reason}"):
        ssd.ssd_chunk_scan(**arguments(inputs), variant=variant)


@pytest.mark.parametrize("variant", OURS)
@pytest.mark.parametrize(("sizes", "said"), [
    ((1, 2**15, 256, 1, 16), "nheads * headdim = 8388608"), ((1, 2**15, 16, 2**15, 256), "ngroups * dstate = 8388608"),
    ((2**31 - 500, 1, 16, 1, 16), "seqlen = 2147483148")], ids=str)
def test_what_kernels_could_not_write_is_refused(variant, sizes, said, device):
    """Outputs and gradients are contiguous, however small the strides of inputs are."""
    seqlen, nheads, headdim, ngroups, dstate = sizes
    x, dt, A, B = (torch.zeros((), device=device).expand(*size) for size in (
        (1, seqlen, nheads, headdim), (1, seqlen, nheads), (nheads,), (1, seqlen, ngroups, dstate)))
    assert said in get_variant(variant).supports(SSDInputs(x, dt, A, B, B, 64))


@pytest.mark.parametrize("variant", OURS)
@pytest.mark.parametrize("argument", ("z", "B", "C"))
@pytest.mark.parametrize("strides", [(1, 2**23, 1, 1), (1, 1, 1, 2**23), (1, 2**22, 1, 2**22)], ids=str)
def test_tiles_beyond_int32_are_refused(variant, argument, strides, device):
    """Offsets inside a chunk of 256 tokens would wrap; the tensors hold nothing here."""
    inputs = random_inputs(SHAPE, EVERYTHING, device=device)
    far = torch.empty_strided(getattr(inputs, argument).shape, strides, device="meta")
    assert f"{argument}: got strides {strides}" in get_variant(variant).supports(replace(inputs, **{argument: far}))


@pytest.mark.parametrize("kernel", sorted(kernel for kernel, space in config_spaces().items() if space.staged))
def test_kernel_that_does_not_fit_names_limit_and_size(kernel):
    tiny = tuning.Device("tiny", 1024)
    with pytest.raises(ValueError, match=rf"{kernel}: .* \d+ bytes .*tiny may have 1024"):
        config_spaces()[kernel].configs(torch.float32, 64, 128, 256, tiny)


@pytest.mark.parametrize("bounds", [[1, 20], [0, 19], [0, 12, 7, 20], [0, 21]], ids=str)
def test_values_of_cu_seqlens_are_checked_on_the_cpu(bounds):
    inputs = random_inputs(replace(SHAPE, batch=1))
    given = arguments(inputs) | {"cu_seqlens": torch.tensor(bounds)}
    assert_refused(ssd.ssd_chunk_scan, given, "cu_seqlens", ValueError, str(bounds), "from 0 to seqlen = 20")


@pytest.mark.parametrize("variant", (*OURS, "torch"))
def test_cu_seqlens_beyond_the_row_stay_inside_it(variant, device):
    """On a GPU nobody checks the values; no kernel may read past the end for them."""
    inputs = random_inputs(replace(SHAPE, batch=1), device=device)
    documents = {"seq_idx": torch.zeros(1, 20, dtype=torch.int32, device=device),
                 "cu_seqlens": torch.tensor([0, 10_000, 20_000], dtype=torch.int32, device=device)}
    _, final_states, saved = get_variant(variant).forward(replace(inputs, **documents), Options(), False)
    torch.testing.assert_close(saved.varlen_states[0], final_states[0])
    assert not saved.varlen_states[1].any()


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted here")
@pytest.mark.parametrize("variant", OURS)
def test_bf16_is_refused_by_the_interpreter(variant):
    """Its bf16 arithmetic is wrong by orders of magnitude."""
    reason = get_variant(variant).supports(random_inputs(SHAPE, dtype=torch.bfloat16))
    assert "interpreter" in reason and "bf16" in reason


def test_an_unknown_option_is_refused_with_the_nearest_name():
    with pytest.raises(TypeError, match=r"options: got 'expp2', expected one of .*; did you mean 'exp2'"):
        Options(expp2=False)
