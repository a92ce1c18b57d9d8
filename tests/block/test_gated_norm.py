"""The gated RMSNorm against its definition in fp64: values, every gradient, and how it behaves inside torch."""

import pytest
import torch
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from ssd.block.gated_norm import RMSNormGated, _as_rows, rms_norm_gated, torch_form
from ssd.block.kernels import gated_norm as kernels
from ssd.runtime import tuning
from tests.errors import Error, error, rounding
from tests.inputs import generator

pytestmark = pytest.mark.usefixtures("poison")
GPU = torch.cuda.is_available()
HALF = torch.bfloat16 if GPU else torch.float16
NAMES = ("x", "weight", "bias", "z")
EPS = 0.02  # enough of a mean square of 1 to be missed
SETTINGS = [(gate, bias) for gate in ("none", "after", "before") for bias in (False, True)]
SIZES = [((2, 5), 40, 20), ((7,), 24, None), ((3, 1, 2), 9, 3), ((33,), 16, 8), ((3,), 1536, 768)]
if GPU:
    SIZES += [((2, 1000), 8192, 1024), ((300,), 5120, None), ((1025,), 1536, 96), ((70,), 12000, None), ((3,), 32768, None)]


def definition(x, weight, bias, z, eps, group_size, norm_before_gate):
    """(N1) to (N4) in fp64, a group at a time."""
    x, weight, bias, z = (None if t is None else t.double() for t in (x, weight, bias, z))
    gate = None if z is None else z / (1 + torch.exp(-z))
    normed = []
    for v in (x if gate is None or norm_before_gate else x * gate).split(group_size or x.shape[-1], -1):
        normed.append(v / (v.pow(2).sum(-1, keepdim=True) / v.shape[-1] + eps).sqrt())
    y = torch.cat(normed, -1) * weight
    if bias is not None:
        y = y + bias
    return y if gate is None or not norm_before_gate else y * gate


def inputs(lead, width, gate, bias, dtype, device, parameter_dtype=torch.float32):
    """x, weight, bias, z; `gate` is "none" or where the norm is, "before" or "after" it."""
    rng = generator(device, lead, width, gate, bias, str(dtype))

    def normal(*size, dtype=parameter_dtype):
        return torch.randn(size, generator=rng, device=device).to(dtype)

    return (normal(*lead, width, dtype=dtype), normal(width), normal(width) if bias else None,
            normal(*lead, width, dtype=dtype) if gate != "none" else None)


def run(function, tensors, group_size, gate, eps=EPS, dout=None):
    """out and the gradients, by name; the cotangent is noise, and what a loss that pulls to zero would send."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    out = function(*leaves, eps, group_size or tensors[0].shape[-1], gate != "after")
    if dout is None:
        dout = torch.randn(out.shape, generator=generator(str(out.device), "dout"), device=out.device) + out.detach().float()
    out.backward(dout.to(out.dtype))
    grads = {f"d{name}": t.grad for name, t in zip(NAMES, leaves, strict=True) if t is not None}
    return {"out": out.detach()} | grads, dout


def assert_right(tensors, group_size, gate):
    """tests/errors.py's rule, with torch_form for the mirror: error <= 2 error(mirror) + one rounding, RMS <= 1e-2.

    dweight and dbias are sums over rows in another order than the mirror's, so their rounding counts as one over that many.
    """
    got, dout = run(rms_norm_gated, tensors, group_size, gate)
    dout = dout.to(got["out"].dtype)
    mirror, _ = run(torch_form, tensors, group_size, gate, dout=dout)
    truth, _ = run(definition, [None if t is None else t.double() for t in tensors], group_size, gate, dout=dout)
    assert got.keys() == mirror.keys() == truth.keys()
    rows = tensors[0].shape[:-1].numel()
    for name, value in got.items():
        assert value.shape == truth[name].shape and value.dtype == mirror[name].dtype, name
        off, allowed = error(value, truth[name]), error(mirror[name], truth[name])
        one = rounding(value.dtype, rows if name in ("dweight", "dbias") else 1)
        bound = Error(min(2 * allowed.rms + one.rms, 1e-2), 2 * allowed.max + one.max)
        assert off.rms <= bound.rms and off.max <= bound.max, f"{name}: {off}, {bound=}"


@pytest.mark.parametrize("dtype", (torch.float32, HALF), ids=str)
@pytest.mark.parametrize("gate, bias", SETTINGS)
@pytest.mark.parametrize("lead, width, group_size", SIZES, ids=str)
def test_every_option(lead, width, group_size, gate, bias, dtype, device):
    assert_right(inputs(lead, width, gate, bias, dtype, device), group_size, gate)


@pytest.mark.parametrize("gate", ("before", "after"))
def test_dtypes_of_their_own(gate, device):
    """x, z and the parameters each in another: a gradient has that of its tensor."""
    x, weight, bias, z = inputs((6,), 24, gate, True, HALF, device)
    assert_right((x, weight.to(HALF), bias, z.float()), 12, gate)
    assert_right((x.float(), weight, bias.to(HALF), z), 12, gate)


@pytest.mark.parametrize("gate, bias", SETTINGS)
def test_programs_that_take_many_tiles(gate, bias, device, monkeypatch):
    """As many rows as give each program of the backward several tiles and a last one cut short, on a device of one SM."""
    monkeypatch.setattr(tuning, "current_device", lambda index: tuning.Device("one SM", 64 * 1024, sms=1))
    assert_right(inputs((401,), 40, gate, bias, torch.float32, device), 20, gate)


def test_the_device_alone_decides_how_many_partial_sums(device, monkeypatch):
    programs = []
    monkeypatch.setattr(kernels, "launch", lambda kernel, count, *args, **config: programs.append(count))

    def count(rows, width, group_size, sms):
        monkeypatch.setattr(tuning, "current_device", lambda index: tuning.Device("some", 227 * 1024, sms=sms))
        x, weight, _, _ = inputs((1,), width, "none", False, torch.float32, device)
        x = x.expand(rows, width)
        kernels.gated_norm_bwd(x, x, weight, None, None, x[:, : width // group_size], group_size, True)
        return programs[-1]

    assert count(5_000, 128, 32, 10) == count(50_000, 128, 32, 10) == 160  # of one warp, 16 on an SM
    assert count(5_000, 128, 32, 20) == 320
    assert count(500, 1024, 1024, 10) == 80
    assert count(50, 8192, 8192, 10) == 10
    assert count(5_000, 128, 1, 1) == 128  # one for each group at least
    assert count(2, 1024, 1024, 10) == 2


def strided(t, layout):
    """The same values, laid out as the name says."""
    if layout.startswith("packed"):  # a slice of rows that are longer by a multiple of 16, 8 or 1
        wide = torch.randn(*t.shape[:-1], 2 * t.shape[-1] + int(layout.split("+")[1]), device=t.device).to(t.dtype)
        wide[..., 8 : 8 + t.shape[-1]] = t
        return wide[..., 8 : 8 + t.shape[-1]]
    if layout == "batch second":
        return t.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "every second channel":
        return t.repeat_interleave(2, -1)[..., ::2]
    assert layout == "channels first"
    return t.mT.contiguous().mT


LAYOUTS = ("packed+16", "packed+8", "packed+3", "batch second", "channels first", "every second channel")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gate", ("before", "after"))
def test_strides(gate, layout, device):
    """Bit for bit as contiguous copies; x and z in different layouts; the gradient comes as one number, expanded."""
    x, weight, bias, z = inputs((3, 5), 40, gate, True, HALF, device)
    dout = torch.ones((), dtype=HALF, device=device).expand(x.shape)
    plain, _ = run(rms_norm_gated, (x, weight, bias, z), 20, gate, dout=dout.contiguous())
    assert dout.stride() == (0, 0, 0)
    for given in ((strided(x, layout), weight, bias, z), (x, weight, bias, strided(z, layout)),
                  (strided(x, "packed+8"), weight.repeat_interleave(2)[::2], bias.flip(0).flip(0), strided(z, layout))):
        got, _ = run(rms_norm_gated, given, 20, gate, dout=dout)
        assert all(torch.equal(got[name], plain[name]) for name in plain) and got["out"].is_contiguous()


def test_slices_are_read_in_place(device):
    x = inputs((3, 5), 40, "none", False, HALF, device)[0]
    for layout, same in (("packed+3", True), ("batch second", False), ("channels first", False)):
        given = strided(x, layout)
        assert (_as_rows(given).untyped_storage().data_ptr() == given.untyped_storage().data_ptr()) == same


@pytest.mark.parametrize("gate", ("none", "before", "after"))
def test_torch_form(gate):
    """What CPU tensors and fp64 take: the definition in fp64, and its gradients against finite differences."""
    tensors = inputs((2, 3), 12, gate, True, torch.float64, "cpu", torch.float64)
    settings = (EPS, 4, gate != "after")
    assert_close(torch_form(*tensors, *settings), definition(*tensors, *settings), rtol=1e-13, atol=1e-13)
    leaves = [t.requires_grad_() for t in tensors if t is not None]

    def call(x, weight, bias, z=None):
        return rms_norm_gated(x, weight, bias, z, *settings)

    assert torch.autograd.gradcheck(call, leaves) and torch.autograd.gradgradcheck(call, leaves)


def test_without_an_interpreter(monkeypatch):
    """CPU tensors, bf16 among them, take the torch form: by itself, and traced."""
    monkeypatch.setattr("ssd.block.arguments.INTERPRETED", False)
    monkeypatch.setattr(kernels, "launch", lambda *args, **config: pytest.fail("a kernel was launched"))
    tensors = inputs((2, 3), 24, "before", True, torch.bfloat16, "cpu")
    expected, dout = run(torch_form, tensors, 8, "before")
    torch._dynamo.reset()
    for function in (rms_norm_gated, torch.compile(rms_norm_gated, fullgraph=True, backend="aot_eager")):
        got, _ = run(function, tensors, 8, "before", dout=dout)
        assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_module(device):
    """Parameters, defaults and values of mamba_ssm's RMSNorm."""
    norm = RMSNormGated(24, group_size=8, norm_before_gate=False, device=device, dtype=HALF)
    assert list(norm.state_dict()) == ["weight"] and norm.bias is None and norm.eps == 1e-5
    assert norm.weight.dtype == HALF and norm.weight.device.type == device and (norm.weight == 1).all()
    x, weight, _, z = inputs((5,), 24, "after", False, HALF, device)
    with torch.no_grad():
        norm.weight.copy_(weight)
    assert torch.equal(norm(x, z), rms_norm_gated(x, norm.weight, None, z, 1e-5, 8, False))
    assert torch.equal(norm(x), rms_norm_gated(x, norm.weight, eps=1e-5, group_size=8))
    assert RMSNormGated(24).norm_before_gate and RMSNormGated(24).group_size is None


def test_the_same_bits_in_every_run(device):
    tensors = inputs((10_000 if GPU else 60,), 160, "before", True, HALF, device)
    first, dout = run(rms_norm_gated, tensors, 32, "before")
    again, _ = run(rms_norm_gated, tensors, 32, "before", dout=dout)
    assert all(torch.equal(first[name], again[name]) for name in first)


def far_apart(t):
    """The same values, with rows 2^30 elements apart; no more memory than they are in is touched."""
    memory = torch.UntypedStorage(t.itemsize * (len(t) * 2**30), device=t.device)
    return torch.tensor([], dtype=t.dtype, device=t.device).set_(memory, 0, t.shape, (2**30, *t.stride()[1:])).copy_(t)


def test_offsets_beyond_int32(device):
    x, weight, bias, z = inputs((4,), 24, "before", True, HALF, device)
    plain, dout = run(rms_norm_gated, (x, weight, bias, z), 8, "before")
    got, _ = run(rms_norm_gated, (far_apart(x), weight, bias, z), 8, "before", dout=dout)
    assert all(torch.equal(got[name], plain[name]) for name in plain)
    got, _ = run(rms_norm_gated, (x, weight, bias, far_apart(z)), 8, "before", dout=dout)
    assert all(torch.equal(got[name], plain[name]) for name in plain)


def test_no_rows(device):
    tensors = inputs((0, 3), 16, "before", True, torch.float32, device)
    got, _ = run(rms_norm_gated, tensors, 8, "before")
    assert got["out"].shape == got["dz"].shape == (0, 3, 16) and not got["dweight"].any() and not got["dbias"].any()


@pytest.mark.parametrize("name", NAMES)
def test_nan_is_not_hidden(name, device):
    tensors = dict(zip(NAMES, inputs((4,), 16, "before", True, torch.float32, device), strict=True))
    tensors[name].view(-1)[-1] = float("nan")
    out = rms_norm_gated(**tensors, group_size=8)
    assert out.isnan().any() and not out[:, :8].isnan().any()


def test_only_where_a_gradient_is_wanted(device):
    x, weight, _, z = inputs((4,), 16, "before", False, torch.float32, device)
    assert rms_norm_gated(x, weight, z=z).grad_fn is None
    weight.requires_grad_()
    with torch.no_grad():
        assert rms_norm_gated(x, weight, z=z).grad_fn is None
    out = rms_norm_gated(x, weight, z=z)
    (dweight,) = torch.autograd.grad(out.square().sum(), weight, create_graph=True)
    assert dweight.shape == weight.shape
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dweight.sum().backward()


@pytest.mark.parametrize("gate, bias", SETTINGS)
def test_opcheck(gate, bias, device):
    tensors = inputs((2, 3), 16, gate, bias, torch.float32, device)
    leaves = [None if t is None else t.requires_grad_() for t in tensors]
    torch.library.opcheck(torch.ops.ssd.rms_norm_gated.default, (*leaves, EPS, 8, True))
    tensors = [None if t is None else t.detach() for t in leaves]
    rstd = torch.ops.ssd.rms_norm_gated(*tensors, EPS, 8, True)[1]
    torch.library.opcheck(torch.ops.ssd.rms_norm_gated_bwd.default, (tensors[0], *tensors, rstd, 8, True))


@pytest.mark.parametrize("dynamic", (None, True))
def test_compile(dynamic, device):
    """One graph, forward and backward, for a second length as well."""
    torch._dynamo.reset()
    compiled = torch.compile(rms_norm_gated, fullgraph=True, backend="inductor" if GPU else "aot_eager", dynamic=dynamic)
    for rows in (5, 8):
        tensors = inputs((2, rows), 24, "after", True, torch.float32, device)
        eager, dout = run(rms_norm_gated, tensors, 12, "after")
        traced, _ = run(compiled, tensors, 12, "after", dout=dout)
        assert_close(traced, eager)


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_checkpoint(use_reentrant, device):
    tensors = inputs((5,), 24, "before", True, torch.float32, device)

    def recomputed(x, *others, **settings):
        return checkpoint(lambda x: rms_norm_gated(x, *others, **settings), x, use_reentrant=use_reentrant)

    plain, dout = run(rms_norm_gated, tensors, 12, "before")
    got, _ = run(recomputed, tensors, 12, "before", dout=dout)
    assert all(torch.equal(got[name], plain[name]) for name in plain)


@pytest.mark.parametrize("dtype", (torch.float32, HALF), ids=str)
def test_autocast(dtype, device):
    """Changes nothing: what a projection hands over in half precision stays it, fp32 stays fp32."""
    tensors = inputs((5,), 24, "before", False, dtype, device)
    plain, dout = run(rms_norm_gated, tensors, 12, "before")
    with torch.autocast(device, HALF):
        got, _ = run(rms_norm_gated, tensors, 12, "before", dout=dout)
        assert_close(torch_form(*tensors, EPS, 12, True), plain["out"])
    assert all(torch.equal(got[name], plain[name]) for name in plain) and got["out"].dtype == dtype


GOOD = dict(zip(NAMES, inputs((2, 3), 24, "before", True, torch.float32, "cpu"), strict=True))


@pytest.mark.parametrize(
    "argument, bad, kind, came, accepted",
    [
        ("x", [1.0], TypeError, "list", "a tensor"),
        ("x", torch.tensor(1.0), ValueError, "shape ()", "(..., width)"),
        ("x", torch.zeros(2, 0), ValueError, "shape (2, 0)", "width >= 1"),
        ("x", torch.zeros(2, 3, 24, dtype=torch.int32), TypeError, "torch.int32", "torch.float32"),
        ("weight", None, TypeError, "NoneType", "a tensor of shape (24,)"),
        ("weight", torch.zeros(23), ValueError, "(23,)", "(24,) to go with x (2, 3, 24)"),
        ("weight", torch.zeros(24, dtype=torch.int64), TypeError, "torch.int64", "torch.float32"),
        ("bias", torch.zeros(1, 24), ValueError, "(1, 24)", "(24,)"),
        ("z", torch.zeros(3, 24), ValueError, "(3, 24)", "(2, 3, 24)"),
        ("z", 1.0, TypeError, "float", "a tensor of shape (2, 3, 24)"),
        ("z", torch.zeros(2, 3, 24, device="meta"), ValueError, "meta", "the device of x"),
        ("eps", None, TypeError, "None", "a number"),
        ("eps", True, TypeError, "True", "a number"),
        ("group_size", 5, ValueError, "5", "a divisor of the width, 24"),
        ("group_size", 0, ValueError, "0", "a divisor of the width, 24"),
        ("group_size", 48, ValueError, "48", "a divisor of the width, 24"),
        ("group_size", 8.0, TypeError, "8.0", "an int"),
        ("norm_before_gate", 1, TypeError, "1", "True or False"),
    ],
    ids=lambda v: str(tuple(v.shape)) if isinstance(v, torch.Tensor) else getattr(v, "__name__", str(v)),
)
def test_bad_arguments(argument, bad, kind, came, accepted, device):
    good = {name: t.to(device) for name, t in GOOD.items()}
    assert_refused(good | {argument: bad.to(device) if isinstance(bad, torch.Tensor) and not bad.is_meta else bad},
                   argument, kind, came, accepted)


def test_too_wide_for_a_kernel(device):
    given = {"x": torch.zeros(1, 40000, device=device), "weight": torch.zeros(40000, device=device)}
    assert_refused(given, "group_size", ValueError, "40000", "at most 32768")
    assert not rms_norm_gated(**given, group_size=20000).any()


@pytest.mark.skipif(GPU, reason="nothing is interpreted here")
@pytest.mark.parametrize("name", NAMES)
def test_bf16_is_refused_by_the_interpreter(name):
    assert_refused(GOOD | {name: GOOD[name].bfloat16()}, name, TypeError, "torch.bfloat16", "TRITON_INTERPRET=1")


def assert_refused(given, argument, kind, came, accepted):
    with pytest.raises(kind) as refused:
        rms_norm_gated(**given)
    text = str(refused.value)
    assert text.startswith(f"{argument}: got ") and came in text.split("expected")[0] and accepted in text.split("expected")[1]


@pytest.mark.gpu
def test_cuda_graph(device):
    tensors = inputs((64,), 2048, "before", False, HALF, device)
    step = lambda: run(rms_norm_gated, tensors, 256, "before", dout=tensors[3])[0]  # noqa: E731
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    tensors[0].copy_(torch.randn_like(tensors[0]))
    graph.replay()
    assert all(torch.equal(captured[name], value) for name, value in step().items())


@pytest.mark.gpu(count=2)
def test_second_device():
    """While another device is current."""
    assert_right(inputs((64,), 2048, "before", True, HALF, "cuda:1"), 256, "before")
