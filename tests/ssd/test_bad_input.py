"""Bad input is refused by name, with what came and what is accepted, and before anything is launched."""

from dataclasses import replace

import pytest
import torch

import ssd
from ssd import api
from ssd.registry import config_spaces, get_variant, variant_names
from ssd.runtime import tuning
from ssd.types import Options
from tests.inputs import EVERYTHING, OURS, Shape, arguments, random_inputs
from tests.refused import assert_refused, name_of

SHAPE = Shape(2, 20, 4, 8, 2, 16, 16)


@pytest.fixture
def call(device, monkeypatch):
    """The public function on good arguments but for those given; a launch fails the test."""
    monkeypatch.setattr(api, "chunk_scan", lambda *_, **__: pytest.fail("something was launched"))
    good = arguments(random_inputs(SHAPE, replace(EVERYTHING, D="h"), device=device))
    return lambda **bad: ssd.ssd_chunk_scan(**good | bad)


WRONG_VALUES = [
    ("x", torch.zeros(20, 4, 8), "(20, 4, 8)", "(batch, seqlen, nheads, headdim)"),
    ("x", torch.zeros(2, 0, 4, 8), "(2, 0, 4, 8)", "at least 1"),
    ("dt", torch.zeros(2, 20, 5), "(2, 20, 5)", "(2, 20, 4)"),
    ("dt", torch.zeros(2, 20, 4, 8), "4 dimensions", "(2, 20, 4)"),
    ("A", torch.zeros(5), "(5,)", "(4,)"),
    ("B", torch.zeros(2, 20, 16), "3 dimensions", "(batch, seqlen, ngroups, dstate)"),
    ("B", torch.zeros(2, 20, 3, 16), "ngroups = 3", "a divisor of nheads = 4"),
    ("B", torch.zeros(2, 20, 8, 16), "ngroups = 8", "a divisor of nheads = 4"),
    ("B", torch.zeros(2, 21, 2, 16), "(2, 21, 2, 16)", "(2, 20, 2, 16)"),
    ("C", torch.zeros(2, 20, 2, 17), "(2, 20, 2, 17)", "(2, 20, 2, 16), the shape of B"),
    ("D", torch.zeros(8), "(8,)", "(4,) or (4, 8)"),
    ("D", torch.zeros(4, 7), "(4, 7)", "(4, 8)"),
    ("z", torch.zeros(2, 20, 4, 9), "(2, 20, 4, 9)", "(2, 20, 4, 8)"),
    ("dt_bias", torch.zeros(1), "(1,)", "(4,)"),
    ("initial_states", torch.zeros(2, 4, 16, 8), "(2, 4, 16, 8)", "(2, 4, 8, 16)"),
    ("seq_idx", torch.zeros(2, 21, dtype=torch.int32), "(2, 21)", "(2, 20)"),
    ("cu_seqlens", torch.zeros(1, 3, dtype=torch.int32), "(1, 3)", "(ndocs + 1,)"),
    ("cu_seqlens", torch.tensor([0, 20]), "batch = 2", "batch 1"),
    ("return_varlen_states", True, "without cu_seqlens", "cu_seqlens"),
    *(("chunk_size", size, str(size), "a power of two from 16 to 256") for size in (48, 8, 512, -16)),
    *(("dt_limit", limit, str(limit), "0 <= min <= max") for limit in ((-0.1, 1.0), (1.0, 0.5), (float("nan"), 1.0))),
    ("dt_limit", (float("inf"), float("inf")), "(inf, inf)", "finite"),
    ("variant", "fastest", "'fastest'", "'baseline'"),
]
WRONG_TYPES = [
    *[(name, None, "NoneType", "a tensor") for name in ("x", "dt", "A", "B", "C")],
    ("D", 1.0, "float", "a tensor"),
    ("cu_seqlens", [0, 20], "list", "a tensor"),
    ("x", torch.zeros(2, 20, 4, 8, dtype=torch.complex64), "torch.complex64", "floating-point"),
    ("x", torch.zeros(2, 20, 4, 8, dtype=torch.float8_e4m3fn), "torch.float8_e4m3fn", "torch.float32"),
    *[(name, torch.zeros(size, dtype=torch.int64), "torch.int64", "floating-point") for name, size in
      {"x": (2, 20, 4, 8), "dt": (2, 20, 4), "A": 4, "B": (2, 20, 2, 16), "C": (2, 20, 2, 16), "D": 4, "z": (2, 20, 4, 8),
       "dt_bias": 4, "initial_states": (2, 4, 8, 16)}.items()],
    ("seq_idx", torch.zeros(2, 20), "torch.float32", "torch.int32 or torch.int64"),
    ("cu_seqlens", torch.zeros(3), "torch.float32", "torch.int32 or torch.int64"),
    ("chunk_size", 64.0, "64.0", "an int"),
    ("chunk_size", True, "True", "an int"),
    ("dt_softplus", "yes", "'yes'", "True or False"),
    *(("dt_limit", limit, str(limit), "two numbers") for limit in (0.1, (0.1,), ("a", "b"))),
    ("state_dtype", torch.int32, "torch.int32", "torch.float32"),
    ("options", {"tf32": True}, "dict", "ssd.Options"),
]


@pytest.mark.parametrize(("kind", "argument", "bad", "came", "accepted"), [
    *((ValueError, *row) for row in WRONG_VALUES), *((TypeError, *row) for row in WRONG_TYPES)], ids=name_of)
def test_bad_arguments_are_refused_by_name(call, device, kind, argument, bad, came, accepted):
    bad = bad.to(device) if isinstance(bad, torch.Tensor) else bad
    assert_refused(call, {argument: bad}, argument, kind, came, accepted)


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


@pytest.mark.parametrize("option, value, kind, accepted", [
    *(("gluon", value, TypeError, "True or False") for value in ("no", 1, None)),
    *(("keep_bytes", value, TypeError, "an int") for value in ("1 GiB", 1.0, None, True)),
    ("keep_bytes", -1, ValueError, "0 or more")], ids=name_of)
def test_values_of_options(option, value, kind, accepted):
    assert_refused(Options, {option: value}, option, kind, repr(value), accepted)


def test_unknown_variant_lists_the_known_ones():
    with pytest.raises(ValueError) as refused:
        get_variant("fastest")
    assert all(repr(name) in str(refused.value) for name in (*variant_names(), "auto", "fastest"))


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
