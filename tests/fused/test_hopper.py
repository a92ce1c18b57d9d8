"""The Gluon kernels: as right as the plain ones wherever they run, and refused with a reason where they do not."""

import math
from dataclasses import replace

import pytest
import torch

from fused import hopper, hopper_backward
from ssd import ssd_chunk_scan
from ssd.kernels.chunk_cumsum import chunk_cumsum
from ssd.registry import get_variant
from ssd.runtime.devices import is_hopper
from ssd.types import Options, SSDGrads, SSDInputs
from tests import errors
from tests.errors import assert_apart, assert_forward_right, assert_right, cotangents, one_cotangent, results
from tests.inputs import Case, Shape, random_inputs

GPU = torch.cuda.is_available() and is_hopper(torch.device("cuda", 0))
needs_hopper = pytest.mark.skipif(not GPU, reason="needs a GPU of compute capability 9")
SHAPE = Shape(2, 700, 8, 64, 2, 128, 128)
SHAPES = {
    "ragged": SHAPE,
    "one token": replace(SHAPE, batch=64, seqlen=1),  # enough of them that their errors' largest is no matter of chance
    "cut": replace(SHAPE, batch=1, seqlen=4096 + 63, ngroups=1),
    "whole rounds": Shape(3, 520, 192, 64, 1, 128, 256),
    "pairs of heads": Shape(2, 4090, 16, 64, 8, 128, 128),
    "whole rounds and cut": Shape(3, 776, 192, 64, 1, 128, 256),
    "dstate 64": replace(SHAPE, dstate=64, chunk_size=64),
    "long": Shape(1, 65_536, 4, 64, 1, 128, 256),
}
START = Case(D="h", dt_bias=True, dt_softplus=True, initial_states=True)
CASES = {
    "plain": Case(),
    "D": START,
    "packed": Case(D="h", packed=True, dt_limit=(0.02, 0.08)),
    "strong_decay": Case(strong_decay=True, D="h", initial_states=True, state_dtype=torch.float32),
    "documents": replace(START, documents="seq_idx"),
}
GRADIENTS = {
    "plain": Case(),
    "start": START,
    "everything": replace(START, z=True, packed=True, dt_limit=(0.02, 0.08)),
    "documents": CASES["documents"],
    "strong_decay": replace(CASES["strong_decay"], dt_dtype=torch.float32),  # ddt goes beyond what fp16 holds
}
WAYS = {"fused": ("fused", Options()), "stationary": ("persistent", Options()),
        "uncut": ("persistent", Options(segments=False)), "in turn": ("persistent", Options(stationary=False))}
over_ways = pytest.mark.parametrize(("variant", "options"), WAYS.values(), ids=WAYS)
over_forms_of_states = pytest.mark.parametrize(
    "like", [lambda t: t.bfloat16(), lambda t: t.half(), lambda t: t.mT.contiguous().mT, lambda t: t[:, :1].expand_as(t)],
    ids=["bf16", "fp16", "transposed", "expanded"])


@needs_hopper
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("shape", "dtype"), [*((shape, torch.bfloat16) for shape in SHAPES), ("ragged", torch.float16)],
                         ids=str)
@over_ways
def test_right(variant, options, shape, case, dtype):
    inputs = random_inputs(SHAPES[shape], CASES[case], dtype, "cuda")
    assert hopper.cannot_run(inputs, options, keeps=True) is None
    assert_forward_right(get_variant(variant), inputs, options)


FORMS = {
    "odd heads": (replace(SHAPE, nheads=25, ngroups=1), START),
    "odd heads, cut": (Shape(1, 4096 + 63, 25, 64, 1, 128, 256), START),
    "a head a group": (replace(SHAPE, nheads=16, ngroups=16), START),
    "headdim 80": (replace(SHAPE, headdim=80), START),
    "headdim 80, cut": (Shape(1, 4096 + 63, 16, 80, 1, 128, 256), START),
    "headdim 80, whole rounds": (Shape(2, 520, 128, 80, 8, 128, 256), START),
    "headdim 128": (replace(SHAPE, headdim=128), START),
    "headdim 96, packed": (replace(SHAPE, headdim=96), Case(D="h", packed=True, dt_limit=(0.02, 0.08))),
    "headdim 112, documents": (replace(SHAPE, headdim=112, dstate=64), replace(START, documents="seq_idx")),
    "headdim 32": (replace(SHAPE, headdim=32, dstate=64, nheads=24, ngroups=1), START),
    "headdim 16, dstate 64": (replace(SHAPE, headdim=16, dstate=64), START),
    "headdim 48, dstate 80": (replace(SHAPE, headdim=48, dstate=80), replace(START, strong_decay=True)),
    "headdim 24, dstate 48, states in fp32": (replace(SHAPE, headdim=24, dstate=48), replace(START, state_dtype=torch.float32)),
    "dstate 256": (replace(SHAPE, dstate=256), START),
    "dstate 256, headdim 128": (replace(SHAPE, headdim=128, dstate=256, ngroups=1), START),
    "dstate 256, headdim 128, cut": (Shape(1, 4096 + 63, 6, 128, 1, 256, 256), START),
    "dstate 192, a head a group": (replace(SHAPE, dstate=192, ngroups=8), START),
    "dstate 160, documents": (replace(SHAPE, headdim=80, dstate=160), replace(START, documents="seq_idx")),
    "dstate 256, gate": (replace(SHAPE, dstate=256), replace(START, z=True)),
    "dstate 256, states in fp32": (replace(SHAPE, dstate=256), replace(START, z=True, state_dtype=torch.float32)),
    "gate": (SHAPE, replace(START, z=True)),
    "gate in fp32": (SHAPE, replace(START, z=True, z_dtype=torch.float32)),
    "dstate 256, gate in fp32": (replace(SHAPE, headdim=32, dstate=256), replace(START, z=True, z_dtype=torch.float32)),
    "gate, headdim 80": (replace(SHAPE, headdim=80), replace(START, z=True)),
    "D by channel": (replace(SHAPE, headdim=80), replace(START, D="hp")),
    "D by channel, dstate 256": (replace(SHAPE, dstate=256), replace(START, D="hp", z=True)),
}


@needs_hopper
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@over_ways
def test_other_forms(variant, options, dtype, form):
    """Outputs and gradients, with states kept and computed again."""
    inputs = random_inputs(*FORMS[form], dtype, "cuda")
    assert hopper.cannot_run(inputs, options, keeps=True) is None
    assert hopper_backward.can_run(inputs, options)
    ways = cotangents(inputs)
    truth = errors.truths(inputs, *ways)
    for save in (True, False):
        got = results(get_variant(variant), inputs, *ways, replace(options, save_states=save))
        errors.assert_all_accurate(got, truth, inputs, *ways)


@needs_hopper
@pytest.mark.parametrize("form", FORMS)
def test_other_forms_give_the_same_bits(form):
    """In every run; the two warpgroups that walk a lone head write the same."""
    assert_same_bits_again(random_inputs(*FORMS[form], torch.bfloat16, "cuda"))


def assert_same_bits_again(inputs: SSDInputs, options: Options | None = None) -> dict[str, torch.Tensor]:
    """Returns the results."""
    ways = cotangents(inputs)
    first = results("persistent", inputs, *ways, options)
    for _ in range(20):
        again = results("persistent", inputs, *ways, options)
        assert all(torch.equal(first[name], t) for name, t in again.items())
    return first


def short_documents(device: str, dstate: int = 64) -> SSDInputs:
    """Of two tokens, so that dA_cumsum falls to -4096 and by as little as 0.2 within a document."""
    case = Case(strong_decay=True, dt_dtype=torch.float32)
    inputs = random_inputs(Shape(2, 128, 4, 64, 1, dstate, 64), case, torch.float16, device)
    return replace(inputs, seq_idx=(torch.arange(128, device=device, dtype=torch.int32) // 2).expand(2, 128).contiguous())


def assert_dA_precise(got: dict[str, torch.Tensor], inputs: SSDInputs, ways: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Its terms nearly cancel: with weights that differ by what dA_cumsum is rounded by, the error is 3e-3."""
    assert errors.error(got["dA"], errors.truths(inputs, *ways)["dA"]).rms < 2e-4


@needs_hopper
@over_ways
@pytest.mark.parametrize("dstate", (64, 192))
def test_dA_of_short_documents(dstate, variant, options):
    inputs = short_documents("cuda", dstate)
    ways = cotangents(inputs)
    assert_dA_precise(results(get_variant(variant), inputs, *ways, options), inputs, ways)


@needs_hopper
@over_ways
def test_D_of_any_stride(variant, options):
    inputs = random_inputs(SHAPE, CASES["D"], torch.bfloat16, "cuda")
    for D in (inputs.D[:1].expand(8), torch.randn(16, device="cuda")[::2]):
        assert_forward_right(get_variant(variant), replace(inputs, D=D), options)


@needs_hopper
@over_ways
def test_same_bits_twice_and_saved_or_not(variant, options):
    """Sizes at which a forward is cut alike whether states are kept or not."""
    inputs = random_inputs(SHAPES["whole rounds and cut"], CASES["D"], torch.bfloat16, "cuda")
    first, again = (get_variant(variant).forward(inputs, options, True) for _ in range(2))
    unsaved = get_variant(variant).forward(inputs, options, False)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert torch.equal(first[2].prev_states, again[2].prev_states)
    assert torch.equal(first[0], unsaved[0]) and unsaved[2].prev_states is None


@needs_hopper
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("case", GRADIENTS)
@pytest.mark.parametrize(("shape", "dtype"), [
    *((shape, torch.bfloat16) for shape in SHAPES if shape != "whole rounds and cut"), ("ragged", torch.float16)], ids=str)
@pytest.mark.parametrize("options", (Options(), Options(save_states=False)), ids=("saved", "recomputed"))
def test_gradients(options, shape, case, dtype):
    """"pairs of heads": more tiles than three rounds of blocks, of fewer heads than there are stages."""
    inputs, variant = random_inputs(SHAPES[shape], GRADIENTS[case], dtype, "cuda"), get_variant("persistent")
    assert hopper_backward.can_run(inputs, options)
    kept = variant.forward(inputs, options, True)[2].prev_states
    assert (kept is not None) == (options.save_states and inputs.states_dtype == inputs.x.dtype)
    assert_right(variant, inputs, options=options)


@needs_hopper
@pytest.mark.parametrize("variant", ("fused", "persistent"))
@pytest.mark.parametrize("gradient", ("dout", "dfinal_states"))
def test_one_gradient_alone(gradient, variant):
    inputs = random_inputs(SHAPE, START, torch.bfloat16, "cuda")
    assert_right(variant, inputs, *one_cotangent(inputs, gradient))


@needs_hopper
@pytest.mark.parametrize("options", [Options(), Options(save_states=False)], ids=["kept", "again"])
@over_forms_of_states
def test_states_of_any_form(like, options):
    """Kernels read them as they were given, contiguous ones."""
    inputs = random_inputs(SHAPE, START, torch.bfloat16, "cuda")
    inputs = replace(inputs, initial_states=like(inputs.initial_states))
    dout, dfinal_states = cotangents(inputs)
    assert hopper_backward.can_run(inputs, options)
    assert_right("persistent", inputs, dout, like(dfinal_states), options=options)


@needs_hopper
def test_steps_of_zero():
    """Their logarithm, in which masks are made, is -inf."""
    inputs = random_inputs(SHAPE, Case(D="h"), torch.bfloat16, "cuda")
    dt = inputs.dt.clone()
    dt[:, ::3] = -1
    assert_right(get_variant("persistent"), replace(inputs, dt=dt))


def test_documents_fall_apart(device):
    """In dA_cumsum, by so much that nothing is left, not where initial_states reach, and rounded once however many begin."""
    seq_idx = torch.tensor([[0] * 30 + [1] * 40 + [2], [1] * 71], dtype=torch.int32, device=device)
    i = replace(random_inputs(Shape(2, 71, 3, 16, 1, 16, 64), Case(dt_softplus=True), torch.float32, device), seq_idx=seq_idx)
    (dt, plain), (same, apart) = chunk_cumsum(i), chunk_cumsum(i, apart=True)
    begun = torch.zeros(2, 2, 64, device=device)
    begun[0, 0, 30:], begun[0, 1, 6:], begun[1, 0] = 1, 1, 1
    assert torch.equal(dt, same)
    assert torch.equal(apart, plain - 128 * begun[:, None])
    assert torch.exp2((apart[0, :, 0, 30] - apart[0, :, 0, 29]) / math.log(2) + 32).eq(0).all()


def one_row_of_documents() -> tuple[SSDInputs, list[int]]:
    """Inputs that the kernels for Hopper take, and between which tokens documents lie."""
    inputs = random_inputs(replace(SHAPE, batch=1), replace(CASES["documents"], initial_states=False), torch.bfloat16, "cuda")
    assert hopper.cannot_run(inputs, Options(), keeps=True) is None and hopper_backward.can_run(inputs, Options())
    begins = (inputs.seq_idx[0].diff() != 0).nonzero().flatten() + 1
    assert len(begins) > 2
    return inputs, [0, *begins.tolist(), inputs.seqlen]


@needs_hopper
@pytest.mark.usefixtures("poison")
@over_ways
def test_documents_of_a_row_are_as_if_run_apart(variant, options):
    assert_apart(variant, *one_row_of_documents(), options)


@needs_hopper
@over_ways
def test_no_gradient_crosses_documents(variant, options):
    """Only the outputs of the last document have a gradient: what came before it gets none at all, to the bit."""
    inputs, (*_, start, _) = one_row_of_documents()
    dout, dfinal_states = cotangents(inputs)
    dout[:, :start] = 0
    got = results(get_variant(variant), inputs, dout, dfinal_states, options)
    for grad in ("dx", "dB", "dC"):
        assert not got[grad][:, :start].any() and got[grad][:, start:].any()


@needs_hopper
@pytest.mark.parametrize("variant", ("fused", "persistent"))
def test_documents_of_four_tokens(variant):
    """16 in each piece of 64 tokens: what their beginnings take from the decays' precision stays within the bounds."""
    inputs = random_inputs(SHAPE, CASES["documents"], torch.bfloat16, "cuda")
    seq_idx = (torch.arange(SHAPE.seqlen, device="cuda", dtype=torch.int32) // 4).expand(SHAPE.batch, -1).contiguous()
    assert_right(get_variant(variant), replace(inputs, seq_idx=seq_idx))


@needs_hopper
@pytest.mark.parametrize("mode", (None, "reduce-overhead"))
@pytest.mark.parametrize("variant", ("fused", "persistent"))
def test_compiled(variant, mode):
    """The op's fake form says what these kernels return, and a graph of torch.compile's making survives its warm-up."""
    i = random_inputs(replace(SHAPE, seqlen=900), START, torch.bfloat16, "cuda")

    def scan(x, dt, B, C):
        return ssd_chunk_scan(x, dt, i.A, B, C, i.chunk_size, D=i.D, dt_bias=i.dt_bias, initial_states=i.initial_states,
                              dt_softplus=True, variant=variant)

    def differentiate(call):
        tensors = [t.detach().clone().requires_grad_() for t in (i.x, i.dt, i.B, i.C)]
        call(*tensors).float().square().sum().backward()
        return [t.grad for t in tensors]

    expected, compiled = differentiate(scan), torch.compile(scan, fullgraph=True, mode=mode)
    for _ in range(4):
        assert all(map(torch.equal, differentiate(compiled), expected))


@needs_hopper
def test_first_call_inside_a_capture_is_refused():
    inputs = random_inputs(replace(SHAPE, seqlen=1234), Case(), torch.bfloat16, "cuda")
    with pytest.raises(RuntimeError, match="capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        get_variant("persistent").forward(inputs, Options(), False)


@needs_hopper
@pytest.mark.parametrize("options", (Options(), Options(save_states=False)), ids=("saved", "recomputed"))
def test_gradients_are_the_same_bits(options):
    """In every run, and where they are asked to be."""
    inputs = random_inputs(replace(SHAPES["cut"], batch=2), START, torch.bfloat16, "cuda")
    ways, variant, first = cotangents(inputs), get_variant("persistent"), assert_same_bits_again(inputs, options)
    fresh = {name: torch.empty_like(first[name]) for name in ("dx", "dB", "dC", "dinitial_states")}
    into = {name: t.new_empty(*t.shape[:-1], 2 * t.shape[-1])[..., ::2] for name, t in fresh.items()}
    for where in (fresh, into):
        saved = variant.forward(inputs, options, True)[2]
        grads = variant.backward(saved, *ways, SSDGrads(**where))
        assert all(getattr(grads, name) is t and torch.equal(t, first[name]) for name, t in where.items())


@needs_hopper
@pytest.mark.parametrize("splits", (2, 3, 4))
def test_heads_of_a_group_in_parts(splits, monkeypatch):
    monkeypatch.setattr(hopper_backward, "choose_splits", lambda tiles, heads, blocks, gpu: splits)
    inputs = random_inputs(replace(SHAPE, nheads=16), CASES["D"], torch.bfloat16, "cuda")
    assert_right(get_variant("persistent"), inputs)


@pytest.mark.parametrize(("case", "shape", "options", "named"), [
    (Case(documents="varlen"), replace(SHAPE, batch=1), Options(), "cu_seqlens"),
    (Case(), replace(SHAPE, headdim=136), Options(), "headdim"),
    (Case(), replace(SHAPE, dstate=100), Options(), "dstate"),
    (Case(), replace(SHAPE, dstate=264), Options(), "dstate"),
    (Case(), replace(SHAPE, headdim=16, dstate=16), Options(), "an eighth"),
    (Case(), replace(SHAPE, chunk_size=32), Options(), "chunk_size"),
    (Case(), SHAPE, Options(gluon=False), "gluon"),
    (Case(), SHAPE, Options(exp2=False), "exp2"),
    (Case(BC_dtype=torch.float32), SHAPE, Options(), "dtypes"),
    (Case(state_dtype=torch.float64), SHAPE, Options(), "state_dtype"),
])
def test_reasons(case, shape, options, named, monkeypatch):
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    inputs = random_inputs(replace(shape, seqlen=100), case, torch.float16, "cpu")
    assert named in hopper.cannot_run(inputs, options, keeps=True)


def test_places_are_counted_in_int32(monkeypatch):
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    inputs = random_inputs(replace(SHAPE, seqlen=100), Case(), torch.float16, "cpu")
    places = inputs.batch * inputs.nheads * 128  # of two sub-chunks
    for most, refused in ((places, True), (places + 1, False)):
        monkeypatch.setattr(hopper, "_MOST_PLACES", most)
        assert ("int32" in str(hopper.cannot_run(inputs, Options(), keeps=True))) == refused


def test_what_is_copied(caplog):
    """Where heads are apart, if there are several; it is said once."""
    wide = torch.zeros(2, 20, 2, 96, dtype=torch.float16)
    hopper._say_copy.cache_clear()
    with caplog.at_level("INFO", "ssd"):
        assert hopper.make_describable(wide[:, :, :1, :64]).data_ptr() == wide.data_ptr() and not caplog.records
        for _ in range(2):
            assert hopper.make_describable(wide[..., :64]).is_contiguous()
    assert len(caplog.records) == 1 and "(3840, 192, 96, 1)" in caplog.text


@pytest.mark.parametrize(("capability", "hip", "yes"), [
    ((9, 0), None, True), ((8, 0), None, False), ((10, 0), None, False), ((9, 4), "6.4", False),
])
def test_where_they_run(capability, hip, yes, monkeypatch):
    """9.4 is how an AMD GPU calls itself."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert is_hopper.__wrapped__(torch.device("cuda", 0)) is yes


def test_elsewhere_the_plain_kernels_run(caplog):
    inputs = random_inputs(replace(SHAPE, seqlen=20), Case(), torch.float16, "cpu")
    hopper._say_plain.cache_clear()
    with caplog.at_level("INFO", "ssd"):
        for options in (Options(), Options(gluon=False)):
            assert not hopper.can_run(hopper.cannot_run(inputs, options, keeps=True), "fused")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "compute capability 9" in said[0] and "gluon is off" in said[1]


def test_strides_that_TMA_cannot_describe():
    """Such tensors are copied, all others taken as they are."""
    x = random_inputs(replace(SHAPE, seqlen=20), Case(), torch.float16, "cpu").x
    one_row = x.narrow(0, 0, 1)
    for odd in (
        torch.empty(*x.shape[:3], 65, dtype=x.dtype)[..., :64],  # heads apart
        torch.empty(*x.shape[:2], 8 * 64 + 4, dtype=x.dtype)[..., : 8 * 64].view(x.shape),  # rows off 16 bytes
        torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape),  # all of it off 16 bytes
        one_row.expand_as(x),  # one row for every batch row
        x[:, :1].expand_as(x),  # one token for all
    ):
        copy = hopper.make_describable(odd)
        assert copy is not odd and copy.is_contiguous() and torch.equal(copy.view(torch.int16), odd.view(torch.int16))
    for even in (x, one_row, x[:, ::2], x.narrow(2, 2, 6)):
        assert hopper.make_describable(even) is even
