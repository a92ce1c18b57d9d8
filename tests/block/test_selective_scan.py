"""Mamba-1's selective scan against its definition in fp64: values, every gradient, and how it behaves inside torch."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

from ssd.block.kernels import selective_scan as kernels
from ssd.block.kernels import selective_scan_dispatch as choice
from ssd.block.kernels import selective_scan_walk as walk
from ssd.block.selective_scan import compute_in_torch, selective_scan_fn
from ssd.block.state_update import selective_state_update
from ssd.runtime import replay
from tests.block import calls
from tests.inputs import GPU, HALF, describe, generator

pytestmark = pytest.mark.usefixtures("poison")
OPTIONAL = ("D", "z", "delta_bias")
LEAVES = ("u", "delta", "A", "B", "C", *OPTIONAL)
SUMS = ("dA", "dB", "dC", "dD", "ddelta_bias")  # over tokens or channels, in another order than the mirror's


@dataclass(frozen=True)
class Case:
    """Sizes and options of a call. decay: the largest rate, and with `even` nearly all of them; without groups B and C have no
    axis for them.
    """

    batch: int = 2
    dim: int = 6
    seqlen: int = 20
    dstate: int = 3
    ngroups: int = 2
    options: tuple[str, ...] = OPTIONAL
    softplus: bool = True
    decay: float = 2.0
    even: bool = False
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return describe(self)


CASES = [
    Case(seqlen=40, dstate=4),
    Case(options=(), softplus=False),
    Case(options=("z",), ngroups=0, dim=5),
    Case(options=("D",), dstate=1, ngroups=3),
    Case(options=("delta_bias",), dstate=5, ngroups=1, dim=9),  # odd everywhere: tiles with channels and states to spare
    Case(batch=1, dim=1, seqlen=1, ngroups=1),
    Case(seqlen=17, decay=200.0),
    Case(seqlen=17, decay=16.0, even=True, softplus=False),  # little is left of a state, and dA is made of that
]
if GPU:
    CASES += [Case(2, 5120, 2048, 16, 0), Case(64, 160, 196, 8, 0), Case(64, 640, 49, 8, 0), Case(2, 256, 20_000, 16, 4),
              Case(3, 1000, 1000, 64, 5), Case(1, 64, 300, 256, 1), Case(128, 96, 151, 16, 0), Case(3, 40, 100, 16, 1),
              Case(2, 66, 64, 8, 2), Case(2, 70, 33, 2, 1, options=()), Case(70, 500, 40, 16, 2, options=("z",)),
              Case(8, 600, 45, 12, 2)]
HALVES = [replace(case, dtype=HALF) for n, case in enumerate(CASES) if GPU or n in (0, 2)]


@pytest.fixture(autouse=True, params=("scan", "walk") if GPU else ("scan",))
def _either_kernels(request, monkeypatch):
    """Every test with the scans over pairs and with the walk, whatever the sizes; and several chunks to a sequence in the
    interpreter too, which is slow.
    """
    for name in ("_FEWEST_CHANNELS", "_FEWEST_OF_GROUP"):
        monkeypatch.setattr(choice, name, 1 if request.param == "walk" else 1 << 62)
    if not GPU:
        monkeypatch.setattr(kernels, "_LANES", 2)
    replay.clear()  # which is of what was launched before
    yield
    replay.clear()


def inputs(case: Case, device: str) -> dict:
    """Arguments of `selective_scan_fn` by name; u and z are halves of one projection, as a Mamba block has them."""
    rng = generator(device, str(case))

    def normal(*size, dtype=case.dtype):
        return torch.randn(size, generator=rng, device=device).to(dtype)

    groups = (case.ngroups,) if case.ngroups else ()
    u, z = normal(case.batch, 2 * case.dim, case.seqlen).chunk(2, 1)
    spread, least = (0.1, 0.9) if case.even else (1.0, 0.01)
    rate = least + spread * torch.rand(case.dim, case.dstate, generator=rng, device=device)
    given = {
        "u": u, "delta": 0.5 * normal(case.batch, case.dim, case.seqlen), "A": -case.decay * rate,
        "B": normal(case.batch, *groups, case.dstate, case.seqlen), "C": normal(case.batch, *groups, case.dstate, case.seqlen),
        "D": normal(case.dim, dtype=torch.float32), "z": z, "delta_bias": normal(case.dim, dtype=torch.float32) - 1,
    }
    if not case.softplus:
        given["delta"] = given["delta"].abs()
        given["delta_bias"] = given["delta_bias"].abs()
    if case.even:
        given["delta"] = 0.9 + 0.1 * given["delta"].abs()
        given["delta_bias"] *= 0
    absent = dict.fromkeys(set(OPTIONAL) - set(case.options))
    return given | absent | {"delta_softplus": case.softplus, "return_last_state": True}


def definition(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=True):
    """(S1) to (S4) in fp64, a token at a time, a group at a time."""
    u, delta, A, B, C, D, z, delta_bias = (None if t is None else t.double() for t in (u, delta, A, B, C, D, z, delta_bias))
    B, C = (t if t.dim() == 4 else t[:, None] for t in (B, C))
    step = delta if delta_bias is None else delta + delta_bias[:, None]
    step = torch.where(step > 20, step, torch.log1p(step.clamp(max=20).exp())) if delta_softplus else step
    state = torch.zeros(*u.shape[:2], A.shape[1], dtype=torch.float64, device=u.device)
    outs = []
    for t in range(u.shape[2]):
        s, x = step[:, :, t], u[:, :, t]
        B_t, C_t = (torch.cat([v[:, g, None, :, t].expand(-1, u.shape[1] // v.shape[1], -1) for g in range(v.shape[1])], 1)
                    for v in (B, C))
        state = torch.exp(s[:, :, None] * A) * state + (s * x)[:, :, None] * B_t
        outs.append(torch.einsum("bdn,bdn->bd", state, C_t) + (0 if D is None else D * x))
    out = torch.stack(outs, 2)
    return out if z is None else out * z / (1 + torch.exp(-z)), state


def mirror(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=True):
    B, C = (t if t.dim() == 4 else t.unsqueeze(1) for t in (B, C))
    return compute_in_torch(u, delta, A, B, C, D, z, delta_bias, delta_softplus)


def run(function, given: dict, ways: tuple[Tensor, ...] | None = None):
    return calls.run(function, given, LEAVES, ("out", "last_state"), ways)


def convert_to_fp64(given: dict) -> dict:
    return calls.convert_to_fp64(given, LEAVES)


def assert_right(given: dict) -> None:
    """The mirror's state takes one token after another, the kernel's is composed of rows, whose factors are rounded too; so
    states count as a sum over tokens does.
    """
    calls.assert_right(selective_scan_fn, mirror, definition, given, LEAVES, ("out", "last_state"), (*SUMS, "last_state"),
                       given["u"].shape[0] * given["u"].shape[2])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES + HALVES, ids=str)
def test_every_option(case, device, request):
    if case.batch * case.dim * case.seqlen * case.dstate > 1 << 26:  # the definition keeps every state, twice
        request.getfixturevalue("much_memory")
    assert_right(inputs(case, device))


def test_steps_give_the_whole(device):
    """Token by token through `selective_state_update`, whose state goes on from a prompt's last."""
    given = inputs(Case(ngroups=0), device)
    whole, last_state = selective_scan_fn(**given)
    u, delta, z, B, C = (given[name] for name in ("u", "delta", "z", "B", "C"))
    prompt = {name: given[name][..., :17] for name in ("u", "delta", "z", "B", "C")}
    out, state = selective_scan_fn(**given | prompt)
    outs = [out]
    for t in range(17, 20):
        y = selective_state_update(state, u[..., t], delta[..., t], given["A"], B[..., t], C[..., t], given["D"], z[..., t],
                                   given["delta_bias"], True)
        outs.append(y[..., None])
    assert_close(torch.cat(outs, 2), whole, rtol=1e-5, atol=1e-5)
    assert_close(state, last_state, rtol=1e-5, atol=1e-5)


def test_without_the_last_state(device):
    given = inputs(Case(), device)
    out = selective_scan_fn(**given | {"return_last_state": False})
    assert torch.equal(out, selective_scan_fn(**given)[0]) and out.grad_fn is None
    assert torch.equal(out, selective_scan_fn(**given | {"return_last_state": None}))  # as MambaVision calls it


@pytest.mark.parametrize("dtypes", ({}, {"u": HALF, "A": torch.float64, "z": torch.float32}), ids=("as they are", "mixed"))
def test_gradients_without_that_of_the_last_state(dtypes, device):
    """As in training; and dtypes of all kinds, each gradient in its own."""
    given = inputs(Case(), device)
    given |= {name: given[name].to(dtype) for name, dtype in dtypes.items()}

    def out_of(function):
        return lambda **arguments: function(**arguments)[:1]

    got, ways = run(out_of(selective_scan_fn), given)
    truth, _ = run(out_of(definition), convert_to_fp64(given), ways)
    for name in LEAVES:
        assert got[f"d{name}"].dtype == given[name].dtype
        assert_close(got[f"d{name}"].double(), truth[f"d{name}"], rtol=1e-2 if dtypes else 1e-4, atol=1e-2 if dtypes else 1e-4)


def test_what_does_not_vary_with_the_token(device):
    """B and C of numbers for each channel, expanded over batch and tokens, as groups of one channel."""
    given = inputs(Case(), device)
    B, C = (torch.randn(6, 3, device=device)[None, :, :, None].expand(2, 6, 3, 20) for _ in range(2))
    got, ways = run(selective_scan_fn, given | {"B": B, "C": C})
    truth, _ = run(definition, convert_to_fp64(given | {"B": B, "C": C}), ways)
    for name in got:
        assert_close(got[name].double(), truth[name], rtol=1e-4, atol=1e-4)


def test_an_infinite_rate_forgets(device):
    given = inputs(Case(), device)
    given["A"][0, 0] = -float("inf")
    got, _ = run(selective_scan_fn, given)
    assert all(t.isfinite().all() for t in got.values())
    given["A"][0, 0] = -1e30
    truth, _ = run(definition, convert_to_fp64(given))
    assert_close(got["out"].double(), truth["out"], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_groups_far_apart(device):
    """Their offsets do not fit int32."""
    given = inputs(Case(batch=1, dim=3, seqlen=8, dstate=1, ngroups=3, options=()), device)
    far = torch.empty(2**31 + 16, dtype=given["B"].dtype, device=device)
    spread = far.as_strided((1, 3, 1, 8), (0, 2**30, 8, 1)).copy_(given["B"])
    got, _ = selective_scan_fn(**given | {"B": spread})
    assert torch.equal(got, selective_scan_fn(**given | {"B": spread.contiguous()})[0])


def test_layouts(device):
    """Bit for bit as contiguous tensors, channels first or last, repeated by strides of 0."""
    given = inputs(Case(), device)
    plain, ways = run(selective_scan_fn, {name: t.contiguous() if isinstance(t, Tensor) else t for name, t in given.items()})
    strided = {name: given[name].mT.contiguous().mT for name in ("u", "delta", "B", "C", "z", "A")}
    strided |= {name: given[name].repeat_interleave(2)[::2] for name in ("D", "delta_bias")}
    got, _ = run(selective_scan_fn, given | strided, (ways[0].mT.contiguous().mT, ways[1].mT.contiguous().mT))
    calls.assert_same_bits(got, plain)
    one = given | {"u": given["u"][:, :1].expand(-1, 6, -1), "A": given["A"][:1].expand(6, -1)}
    same, _ = run(selective_scan_fn, one)
    again, _ = run(selective_scan_fn, one | {"u": one["u"].contiguous(), "A": one["A"].contiguous()})
    calls.assert_same_bits(same, again)


@pytest.mark.gpu
def test_the_same_bits_in_every_run(device):
    """Of many programs; of few in tests/test_inside_torch.py."""
    given = inputs(Case(4, 512, 3000, 16), device)
    first, ways = run(selective_scan_fn, given)
    calls.assert_same_bits(run(selective_scan_fn, given, ways)[0], first)


@torch._inductor.config.patch(force_disable_caches=True)  # caches do not know that other kernels are forced
@pytest.mark.parametrize("dynamic", (None, True))
def test_compile(dynamic, device):
    """Forward and backward, for many lengths, of which few need a graph of their own."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor" if GPU else "aot_eager")
    compiled = torch.compile(selective_scan_fn, fullgraph=True, backend=counter, dynamic=dynamic)
    for seqlen in (5, 20):
        given = inputs(Case(dim=2, dstate=2, seqlen=seqlen), device)
        eager, ways = run(selective_scan_fn, given)
        traced, _ = run(compiled, given, ways)
        assert_close(traced, eager)
    for seqlen in range(21, 40, 2):
        compiled(**inputs(Case(batch=1, dim=2, dstate=1, seqlen=seqlen), device))
    assert counter.frame_count <= 7


@pytest.mark.gpu
def test_large_warps(device, monkeypatch):
    """What large inputs take."""
    for name in ("_LARGE", "_PROGRAMS"):
        monkeypatch.setattr(walk, name, 1)
    assert_right(inputs(Case(4, 300, 70, 16, 1), device))


@pytest.mark.gpu
@pytest.mark.slow
def test_offsets_beyond_int32(device, much_memory):
    """2^31 elements of u and of its gradient: the last channels of the last row, judged by themselves.

    As many of them as the walk still takes by the same warps: others sum in another order.
    """
    given = inputs(Case(2, 2048, 600_000, 4, 0, dtype=torch.bfloat16), device)
    got, ways = run(selective_scan_fn, given)
    last = slice(2048 - 256, 2048)
    assert walk.channels_and_rows(1, 256, 600_000, 4) == walk.channels_and_rows(2, 2048, 600_000, 4)
    part = {name: given[name][1:, last] for name in ("u", "delta", "z")}
    part |= {name: given[name][last] for name in ("A", "D", "delta_bias")} | {name: given[name][1:] for name in ("B", "C")}
    alone, _ = run(selective_scan_fn, given | part, (ways[0][1:, last], ways[1][1:, last]))
    for name in ("out", "last_state", "du", "ddelta", "dz"):
        assert torch.equal(got[name][1:, last], alone[name]), name
