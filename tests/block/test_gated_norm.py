"""The gated RMSNorm against its definition in fp64: values, every gradient, and how it behaves inside torch."""

import pytest
import torch

from experiments.fuzz.block.gated_norm import define as definition
from ssd.block.gated_norm import RMSNormGated, compute_in_torch, rms_norm_gated
from ssd.block.kernels import gated_norm as kernels
from ssd.runtime import tuning
from tests.block import calls
from tests.inputs import GPU, HALF, generator
from tests.refused import assert_refused

pytestmark = pytest.mark.usefixtures("poison")
NAMES = ("x", "weight", "bias", "z")
EPS = 0.02  # enough of a mean square of 1 to be missed
SETTINGS = [(gate, bias) for gate in ("none", "after", "before") for bias in (False, True)]
SIZES = [((2, 5), 40, 20), ((7,), 24, None), ((3, 1, 2), 9, 3), ((33,), 16, 8), ((3,), 1536, 768)]
if GPU:
    SIZES += [((2, 1000), 8192, 1024), ((300,), 5120, None), ((1025,), 1536, 96), ((70,), 12000, None), ((3,), 32768, None)]


def inputs(lead, width, gate, bias, dtype, device, parameter_dtype=torch.float32):
    """x, weight, bias, z; `gate` is "none" or where the norm is, "before" or "after" it."""
    rng = generator(device, lead, width, gate, bias, str(dtype))

    def normal(*size, dtype=parameter_dtype):
        return torch.randn(size, generator=rng, device=device).to(dtype)

    return (normal(*lead, width, dtype=dtype), normal(width), normal(width) if bias else None,
            normal(*lead, width, dtype=dtype) if gate != "none" else None)


def name_arguments(tensors, group_size, gate, eps=EPS) -> dict:
    """Arguments of `rms_norm_gated` by name."""
    return {**dict(zip(NAMES, tensors, strict=True)), "eps": eps, "group_size": group_size or tensors[0].shape[-1],
            "norm_before_gate": gate != "after"}


def run(function, tensors, group_size, gate, dout=None):
    """out and the gradients, by name, and the cotangent."""
    got, (dout,) = calls.run(function, name_arguments(tensors, group_size, gate), NAMES, ways=None if dout is None else (dout,))
    return got, dout


def assert_right(tensors, group_size, gate):
    calls.assert_right(rms_norm_gated, compute_in_torch, definition, name_arguments(tensors, group_size, gate), NAMES, ("out",),
                       ("dweight", "dbias"), tensors[0].shape[:-1].numel())


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

    assert count(5_000, 128, 32, 10) == count(50_000, 128, 32, 10) > count(5_000, 128, 32, 5)


def lay_out(t, layout):
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
    for given in ((lay_out(x, layout), weight, bias, z), (x, weight, bias, lay_out(z, layout)),
                  (lay_out(x, "packed+8"), weight.repeat_interleave(2)[::2], bias.flip(0).flip(0), lay_out(z, layout))):
        got, _ = run(rms_norm_gated, given, 20, gate, dout=dout)
        assert all(torch.equal(got[name], plain[name]) for name in plain) and got["out"].is_contiguous()


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


def test_no_rows(device):
    tensors = inputs((0, 3), 16, "before", True, torch.float32, device)
    got, _ = run(rms_norm_gated, tensors, 8, "before")
    assert got["out"].shape == got["dz"].shape == (0, 3, 16) and not got["dweight"].any() and not got["dbias"].any()


def test_too_wide_for_a_kernel(device):
    given = {"x": torch.zeros(1, 40000, device=device), "weight": torch.zeros(40000, device=device)}
    assert_refused(rms_norm_gated, given, "group_size", ValueError, "40000", "at most 32768")
    assert not rms_norm_gated(**given, group_size=20000).any()
