"""The one-token update against its definition in fp64, and token by token against the operator over whole sequences."""

import pytest
import torch
from torch.testing import assert_close

from ssd import reference
from ssd.block.kernels.state_update import state_update
from ssd.block.state_update import compute_in_torch, selective_state_update
from tests.errors import assert_near
from tests.inputs import GPU, HALF, Case, Shape, generator, random_inputs
from tests.refused import assert_refused

pytestmark = pytest.mark.usefixtures("poison")
NAMES = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias")
OPTIONAL = ("D", "z", "dt_bias")
OPTIONS = [(), ("D",), ("z",), ("dt_bias",), ("dt_softplus",), (*OPTIONAL, "dt_softplus")]
TIED = ("A", "A's rows", "dt", "dt_bias")
SIZES = [(3, 4, 2, 10, 20), (3, 1, 1, 150, 16)]  # batch, nheads, ngroups, dim, dstate
if GPU:
    SIZES += [(16, 128, 8, 64, 128), (5, 1, 1, 5120, 16), (3, 24, 1, 64, 256), (2, 3, 3, 56, 100)]


def definition(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices):
    """(U1) to (U4) in fp64, a head of a row at a time."""
    state, x, dt, A, B, C, D, z, dt_bias = (None if t is None else t.double() for t in (state, x, dt, A, B, C, D, z, dt_bias))
    rows = range(len(x)) if state_batch_indices is None else state_batch_indices.tolist()
    out = torch.zeros_like(x)
    for b, row in [(b, row) for b, row in enumerate(rows) if row >= 0]:
        for h in range(x.shape[1]):
            g = h * B.shape[1] // x.shape[1]
            step = dt[b, h] if dt_bias is None else dt[b, h] + dt_bias[h]
            step = torch.log1p(step.exp()) if dt_softplus else step
            state[row, h] = torch.exp(step[:, None] * A[h]) * state[row, h] + torch.outer(step * x[b, h], B[b, g])
            y = state[row, h] @ C[b, g] + (0 if D is None else D[h] * x[b, h])
            out[b, h] = y if z is None else y * z[b, h] / (1 + torch.exp(-z[b, h]))
    return out, state


def inputs(sizes=SIZES[0], options=OPTIONS[-1], tied=(), indexed=False, dtype=torch.float32, state_dtype=torch.float32,
           device="cpu"):
    """Arguments by name. tied: those that are numbers of a head, repeated; "A's rows" repeat along dstate alone. indexed: three
    rows of state are spare, the others in no order, and every third row of x is padding."""
    batch, nheads, ngroups, dim, dstate = sizes
    rng = generator(device, sizes, options, tied, indexed, str(dtype), str(state_dtype))

    def normal(*size, dtype=dtype):
        return torch.randn(size, generator=rng, device=device).to(dtype)

    def uniform(*size, dtype=torch.float32):
        return (torch.rand(size, generator=rng, device=device) + 0.05).to(dtype)

    def width(name):
        return 1 if name in tied else dim

    indices = None
    if indexed:
        indices = torch.randperm(batch + 3, generator=rng, device=device)[:batch].to(torch.int32)
        indices[1::3] = -1
    made = {
        "state": normal(batch + 3 * indexed, nheads, dim, dstate, dtype=state_dtype),
        "x": normal(batch, nheads, dim),
        "dt": uniform(batch, nheads, width("dt"), dtype=dtype).expand(batch, nheads, dim),
        "A": (-uniform(nheads, width("A"), 1 if "A's rows" in tied else dstate)).expand(nheads, dim, dstate),
        "B": normal(batch, ngroups, dstate), "C": normal(batch, ngroups, dstate),
        "D": normal(nheads, dim, dtype=torch.float32), "z": normal(batch, nheads, dim),
        "dt_bias": uniform(nheads, width("dt_bias")).expand(nheads, dim),
        "dt_softplus": "dt_softplus" in options, "state_batch_indices": indices,
    }
    return made | {name: None for name in OPTIONAL if name not in options}


def run(given, function=selective_state_update):
    """out and the new state, of a copy."""
    state = given["state"].clone(memory_format=torch.preserve_format)
    return function(**given | {"state": state}), state


def assert_all_near(got, mirror, truth):
    for name, value, other, right in zip(("out", "state"), got, mirror, truth, strict=True):
        assert_near(name, value, right, other)


@pytest.mark.parametrize("indexed", (False, True), ids=("", "indexed"))
@pytest.mark.parametrize("tied", ((), TIED), ids=("", "tied"))
@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_option(sizes, options, tied, indexed, device):
    given = inputs(sizes, options, tied, indexed, device=device)
    got = run(given)
    assert_all_near(got, run(given, compute_in_torch), definition(**given))
    if indexed:
        used = given["state_batch_indices"]
        others = [row for row in range(len(given["state"])) if row not in used.tolist()]
        assert torch.equal(got[1][others], given["state"][others]) and not got[0][used < 0].any()


@pytest.mark.parametrize("dtype, state_dtype", [(HALF, HALF), (HALF, torch.float32), (torch.float32, HALF)], ids=str)
@pytest.mark.parametrize("tied", ((), TIED), ids=("", "tied"))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_dtypes(sizes, tied, dtype, state_dtype, device):
    """Activations and the state each in their own; A, D and dt_bias in fp32."""
    given = inputs(sizes, tied=tied, dtype=dtype, state_dtype=state_dtype, device=device)
    assert_all_near(run(given), run(given, compute_in_torch), definition(**given))


@pytest.mark.parametrize("free", TIED)
def test_tied_but_for_one(free, device):
    """What is taken once a head must be one number there in every factor."""
    given = inputs(tied=[name for name in TIED if name != free], device=device)
    assert_all_near(run(given), run(given, compute_in_torch), definition(**given))


@pytest.mark.parametrize("tied", ((), TIED), ids=("", "tied"))
def test_one_head_without_an_axis_for_it(tied, device):
    """As Mamba-1 calls it; B and C alone may lack theirs too."""
    given = inputs((3, 1, 1, 30, 16), tied=tied, indexed=True, device=device)
    whole = run(given)
    bare = {name: t if t is None or name not in NAMES else t.squeeze(0 if name in ("A", "D", "dt_bias") else 1)
            for name, t in given.items()}
    out, state = run(bare)
    assert out.shape == (3, 30) and torch.equal(out, whole[0][:, 0]) and torch.equal(state, whole[1][:, 0])
    assert torch.equal(run(given | {"B": bare["B"], "C": bare["C"]})[0], whole[0])


def test_strides(device):
    """Slices of one projection, a state inside a larger cache, transposed axes: as copies; on a GPU sums have another order."""
    given = inputs(indexed=True, device=device)
    plain = run(given)
    x, B, C, dt, z = (torch.cat([given[name].flatten(1) for name in ("x", "B", "C", "dt", "z")], 1)
                      .split([40, 40, 40, 40, 40], 1))
    packed = {"x": x.unflatten(1, (4, 10)), "B": B.unflatten(1, (2, 20)), "C": C.unflatten(1, (2, 20)),
              "dt": dt.unflatten(1, (4, 10)), "z": z.unflatten(1, (4, 10)),
              "A": given["A"].mT.contiguous().mT, "D": given["D"].t().contiguous().t(),
              "state_batch_indices": given["state_batch_indices"].long().repeat_interleave(2)[::2]}
    cache = torch.zeros(6, 20, 4, 12, device=device)
    state = cache[..., 1:11].permute(0, 2, 3, 1).copy_(given["state"])
    out = selective_state_update(**given | packed | {"state": state})
    exact = {} if device == "cuda" else {"rtol": 0, "atol": 0}
    assert_close((out, state), plain, **exact)
    assert out.is_contiguous()
    assert not cache[..., [0, 11]].any()


def test_offsets_beyond_int32(device):
    """Rows of the state 2^30 elements apart; no more than what they are in is touched."""
    given = inputs((3, 2, 1, 5, 8), state_dtype=HALF, device=device)
    memory = torch.UntypedStorage(2 * 3 * 2**30, device=device)
    far = torch.tensor([], dtype=HALF, device=device).set_(memory, 0, (3, 2, 5, 8), (2**30, 40, 8, 1)).copy_(given["state"])
    out = selective_state_update(**given | {"state": far})
    assert all(torch.equal(a, b) for a, b in zip((out, far), run(given), strict=True))


def test_padding_may_hold_anything(device):
    given = inputs(indexed=True, device=device)
    clean = run(given)
    for name in ("x", "dt", "B", "C", "z"):
        given[name] = given[name].clone()
        given[name][1] = float("nan")
    assert all(torch.equal(a, b) for a, b in zip(run(given), clean, strict=True))


SEQUENCE = Case(D="hp", z=True, dt_bias=True, dt_softplus=True, initial_states=True)


def decode(i, state, function=selective_state_update):
    """Outputs of a sequence, a token at a time, as Mamba-2's step calls the update; `state` is taken along."""
    A = i.A[:, None, None].expand(i.nheads, i.headdim, i.dstate)
    dt_bias, dt = i.dt_bias[:, None].expand(i.nheads, i.headdim), i.dt[..., None].expand(i.x.shape)
    tokens = [function(state, i.x[:, t], dt[:, t], A, i.B[:, t], i.C[:, t], i.D, i.z[:, t], dt_bias, i.dt_softplus, None)
              for t in range(i.seqlen)]
    return torch.stack(tokens, 1)


@pytest.mark.parametrize("dtype", (torch.float32, HALF), ids=str)
def test_tokens_add_up_to_the_operator(dtype, device):
    """Every output and the last state of a sequence, against the recurrence that defines the operator."""
    i = random_inputs(Shape(1, 12, 4, 8, 2, 24, 16), SEQUENCE, dtype, device)
    states = [i.initial_states.clone() for _ in range(2)]
    outs = decode(i, states[0]), decode(i, states[1], compute_in_torch)
    assert_all_near((outs[0], states[0]), (outs[1], states[1]), reference.recurrence(i))


def test_an_index_beyond_the_state(device):
    """Refused on the CPU, which looks; on a GPU it counts as padding, and nothing is read or written there."""
    beyond = torch.tensor([2, 3, 0], device=device)
    given = inputs(device=device) | {"state_batch_indices": beyond}
    if not GPU:
        assert_refused(selective_state_update, given, "state_batch_indices", ValueError, "3", "below 3")
    given["state_batch_indices"] = torch.where(beyond == 3, -1, beyond)
    expected = run(given)
    out, state = expected[0], given["state"].clone()
    named = (state, *(given[name] for name in NAMES[1:]), given["dt_softplus"])
    assert torch.equal(state_update(*named, beyond), out) and torch.equal(state, expected[1])


@pytest.mark.gpu
def test_cuda_graph(device):
    """A step captured once takes the state further at each replay."""
    given = inputs(SIZES[2], tied=TIED, indexed=True, dtype=HALF, device=device)
    eager = given["state"].clone()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run(given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = selective_state_update(**given)
    for _ in range(3):
        graph.replay()
        assert torch.equal(out, selective_state_update(**given | {"state": eager})) and torch.equal(given["state"], eager)
