"""The projections of one token with what is beside them, and the sum with its norm, against their equations in fp64."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from ssd.block.kernels import token_projections
from ssd.block.kernels.residual_norm import residual_norm
from ssd.block.kernels.token_projections import MOST, project_in, project_out
from tests.errors import assert_near
from tests.inputs import GPU, generator

pytestmark = pytest.mark.usefixtures("poison")
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    batch: int = 2
    d_model: int = 72
    d_ssm: int = 384
    ngroups: int = 1
    conv_dim: int = 10  # of the columns after the first 5
    columns: int = 21
    width: int = 4  # of the filter
    bias: bool = False
    norm: bool = True
    dtype: torch.dtype = torch.float16
    residual: torch.dtype = torch.float32


CASES = {
    "one sequence": Case(1),
    "every sequence": Case(MOST, columns=90, d_model=1100),
    "groups": Case(ngroups=3),
    "many groups, of whole steps": Case(1, d_ssm=4096, ngroups=2, columns=9, conv_dim=4),
    "biases, two taps": Case(bias=True, width=2),
    "no norm": Case(norm=False, residual=torch.float16, width=3),
}
if GPU:
    published = Case(1, 2560, 5120, 1, 5376, 10576, dtype=torch.bfloat16)
    CASES |= {"2.7b": published, "2.7b, most": replace(published, batch=MOST),
              "8b": Case(2, 4096, 8192, 8, 10240, 18560, dtype=torch.bfloat16, residual=torch.bfloat16)}
over_cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def inputs(c: Case, device: str) -> dict[str, Tensor | None]:
    rng = generator(device, str(c))

    def normal(*size, scale=1.0, dtype=c.dtype, shift=0.0):
        return (torch.randn(size, generator=rng, device=device) * scale + shift).to(dtype)

    strided = normal(c.batch, c.conv_dim, 2 * (c.width - 1))[..., ::2]
    return {
        "residual": normal(c.batch, c.d_model, dtype=c.residual, scale=3), "norm": normal(c.d_model, scale=0.3, shift=1),
        "W_in": normal(c.columns, c.d_model, scale=c.d_model**-0.5), "b_in": normal(c.columns) if c.bias else None,
        "past": strided, "filter": normal(c.conv_dim, c.width, scale=0.5), "b_conv": normal(c.conv_dim) if c.bias else None,
        "y": normal(c.batch, c.d_ssm + 7)[:, 3:-4], "norm_out": normal(c.d_ssm, scale=0.3, shift=1) if c.norm else None,
        "W_out": normal(c.d_model, c.d_ssm, scale=c.d_ssm**-0.5), "b_out": normal(c.d_model) if c.bias else None,
    }


def define_in(given: dict, rounded: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """(T1) to (T3), the columns and the state of the convolution; in fp64, or with the kernel's rounding points."""
    compute = torch.float32 if rounded else torch.float64
    t = {name: None if v is None else v.to(compute) for name, v in given.items()}

    def round_off(v):
        return v.to(rounded).to(compute) if rounded else v

    r = round_off(t["residual"])
    u = round_off(r * t["norm"]) @ t["W_in"].T / (r.square().mean(1, keepdim=True) + EPS).sqrt()
    u = round_off(u if t["b_in"] is None else u + t["b_in"])
    columns = slice(5, 5 + len(t["filter"]))
    taps = torch.cat([t["past"], u[:, columns, None]], 2)
    pre = (taps * t["filter"]).sum(2)
    pre = pre if t["b_conv"] is None else pre + t["b_conv"]
    out = u.clone()
    out[:, columns] = round_off(pre * torch.sigmoid(pre))
    return out, taps[:, :, 1:]


def define_out(given: dict, ngroups: int, rounded: torch.dtype | None) -> Tensor:
    """(T5) and (T6): the residual stream afterwards."""
    compute = torch.float32 if rounded else torch.float64
    t = {name: None if v is None else v.to(compute) for name, v in given.items()}

    def round_off(v):
        return v.to(rounded).to(compute) if rounded else v

    v, W = t["y"], t["W_out"]
    if t["norm_out"] is None:
        o = v @ W.T
    else:
        groups = round_off(v * t["norm_out"]).unflatten(1, (ngroups, -1))
        parts = torch.einsum("bgk,ngk->bgn", groups, W.unflatten(1, (ngroups, -1)))
        o = (parts / (v.unflatten(1, (ngroups, -1)).square().mean(2, keepdim=True) + EPS).sqrt()).sum(1)
    return t["residual"] + round_off(o if t["b_out"] is None else o + t["b_out"])


@over_cases
def test_the_first_projection(case, device):
    given = inputs(case, device)
    state = given["past"]
    given["past"] = state.clone()
    got = project_in(given["residual"], given["norm"], EPS, given["W_in"], given["b_in"], state, given["filter"],
                     given["b_conv"], 5)
    truth, mirror = define_in(given, None), define_in(given, case.dtype)
    assert_near("out", got, truth[0], mirror[0].to(case.dtype), case.d_model)
    assert_near("conv_state", state, truth[1], mirror[1].to(case.dtype), case.d_model)
    assert torch.equal(state[:, :, :-1], given["past"][:, :, 1:])


@over_cases
def test_the_second_projection(case, device):
    given = inputs(case, device)
    residual = given["residual"].clone()
    got = project_out(given["y"], given["norm_out"], EPS, case.d_ssm // case.ngroups, given["W_out"], given["b_out"], residual)
    assert torch.equal(residual, given["residual"])
    assert_near("residual", got, define_out(given, case.ngroups, None),
                define_out(given, case.ngroups, case.dtype).to(case.residual), case.d_ssm)


@pytest.mark.parametrize("width", (5, 256, 700))
@pytest.mark.parametrize("residual", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("added", (True, False), ids=("added", "first"))
def test_the_sum_and_its_norm(added, residual, width, device):
    rng = generator(device, added, str(residual), width)
    r, o, w = torch.randn(3, 3, width, generator=rng, device=device)
    r, o, w = r.to(residual), o.half(), w[0].half()
    before = r.clone()
    stream, got = residual_norm(r, o if added else None, w, EPS)
    assert torch.equal(r, before)
    after = (r.float() + (o.float() if added else 0)).to(residual)
    assert torch.equal(stream, after)

    def norm(v):
        return v / (v.square().mean(1, keepdim=True) + EPS).sqrt() * w.to(v.dtype)

    assert_near("out", got, norm(after.double()), norm(after.half().float()).half())


def test_tiles_are_those_that_measured_best():
    sms = token_projections.tuning.current_device(None).sms

    def choose(columns, channels=64, batch=1):
        form = token_projections.Form(batch, channels, columns, channels)
        return token_projections._choose_tile(form, torch.empty(0))[1]["BLOCK_N"]

    assert [choose(columns) for columns in (80, 32 * sms - 8, 32 * sms)] == [4, 4, 8]
    assert choose(64, 128) == 2 and choose(32 * sms, batch=2) == choose(64, 128, batch=2) == 4
