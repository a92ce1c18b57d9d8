"""split_conv1d_scan against one loop over tokens in fp64, in outputs, states and every gradient."""

import pytest
import torch
import torch.nn.functional as F

from ssd.block.split_conv1d_scan import split_conv1d_scan
from tests.inputs import generator

BATCH, SEQLEN, NHEADS, HEADDIM, NGROUPS, DSTATE, WIDTH = 2, 19, 4, 8, 2, 16, 4
DIM, GROUP = NHEADS * HEADDIM, NGROUPS * DSTATE
BOUND = 2e-5  # of a tensor's norm

CASES = {
    "gate alone": {"norm": False, "outproj_bias": False},
    "gate alone, no projection": {"norm": False, "outproj": False, "outproj_bias": False, "D_hp": True, "mlp": 6},
    "norm after gate": {"norm_before_gate": False, "seq_idx": True, "mlp": 6},
    "norm before gate": {"initial_states": True, "final": True, "outproj_bias": False, "D_hp": True},
    "documents": {"seq_idx": True, "initial_states": True, "final": True, "dt_limit": [0.3, 0.9], "norm": False},
    "no activation": {"activation": None, "conv_bias": False, "outproj": False, "outproj_bias": False, "final": True},
}


def drawn(norm=True, outproj=True, outproj_bias=True, conv_bias=True, D_hp=False, seq_idx=False, initial_states=False, mlp=0,
          final=False, **settings) -> dict:
    """Arguments with random tensors in fp32."""
    rng = generator("cpu", norm, outproj, D_hp, seq_idx, mlp)

    def normal(*size):
        return torch.randn(size, generator=rng)

    documents = torch.tensor([[0] * 7 + [1] + [2] * 11, [3] * 16 + [4] * 3], dtype=torch.int32)
    return {
        "zxbcdt": normal(BATCH, SEQLEN, 2 * mlp + 2 * DIM + 2 * GROUP + NHEADS),
        "conv1d_weight": normal(DIM + 2 * GROUP, WIDTH),
        "conv1d_bias": normal(DIM + 2 * GROUP) if conv_bias else None,
        "dt_bias": normal(NHEADS),
        "A": -normal(NHEADS).exp(),
        "D": normal(NHEADS, HEADDIM) if D_hp else normal(NHEADS),
        "chunk_size": 16,
        "initial_states": normal(BATCH, NHEADS, HEADDIM, DSTATE) if initial_states else None,
        "seq_idx": documents if seq_idx else None,
        "return_final_states": final,
        "rmsnorm_weight": normal(DIM) if norm else None,
        "rmsnorm_eps": 1e-5 if norm else None,
        "outproj_weight": normal(24, mlp + DIM) if outproj else None,
        "outproj_bias": normal(24) if outproj_bias else None,
        "headdim": None if D_hp else HEADDIM,
        "ngroups": NGROUPS,
        **settings,
    }


def token_by_token(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, initial_states, seq_idx, rmsnorm_weight, rmsnorm_eps,
                   outproj_weight, outproj_bias, dt_limit=(0.0, float("inf")), activation="silu", norm_before_gate=True, **_):
    mlp = (zxbcdt.shape[-1] - 2 * DIM - 2 * GROUP - NHEADS) // 2
    z0, x0, z, xBC, dt = zxbcdt.split([mlp, mlp, DIM, DIM + 2 * GROUP, NHEADS], -1)
    document = zxbcdt.new_zeros(BATCH, SEQLEN) if seq_idx is None else seq_idx
    dt = F.softplus(dt + dt_bias).clamp(*dt_limit)
    state = xBC.new_zeros(BATCH, NHEADS, HEADDIM, DSTATE) if initial_states is None else initial_states
    state = torch.where((document[:, 0] == 0)[:, None, None, None], state, 0)
    rows = []
    for t in range(SEQLEN):
        taps = [(conv1d_weight[:, -1 - back] * xBC[:, t - back]).where((document[:, t] == document[:, t - back])[:, None], 0)
                for back in range(min(WIDTH, t + 1))]
        convolved = sum(taps) if conv1d_bias is None else sum(taps) + conv1d_bias
        x, B, C = (F.silu(convolved) if activation else convolved).split([DIM, GROUP, GROUP], -1)
        x = x.unflatten(-1, (NHEADS, HEADDIM))
        B, C = (s.unflatten(-1, (NGROUPS, 1, DSTATE)).repeat_interleave(NHEADS // NGROUPS, 1) for s in (B, C))
        if t:
            state = state.where((document[:, t] == document[:, t - 1])[:, None, None, None], 0)
        decay, step = (dt[:, t] * A).exp()[..., None, None], dt[:, t, :, None, None]
        state = state * decay + step * x[..., None] * B
        rows.append((state * C).sum(-1) + (D if D.dim() == 2 else D[:, None]) * x)
    y = torch.stack(rows, 1).flatten(2)

    def norm(v):
        if rmsnorm_weight is None:
            return v
        groups = v.unflatten(-1, (NGROUPS, -1))
        return (groups / (groups.square().mean(-1, keepdim=True) + rmsnorm_eps).sqrt()).flatten(-2) * rmsnorm_weight

    y = norm(y) * F.silu(z) if norm_before_gate else norm(y * F.silu(z))
    y = torch.cat([F.silu(z0) * x0, y], -1)
    return (y if outproj_weight is None else F.linear(y, outproj_weight, outproj_bias)), state


def leaves(arguments: dict, dtype: torch.dtype, device: str) -> dict:
    """The same arguments in that dtype, with a gradient asked for on every tensor that can have one."""

    def leaf(value):
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().to(device, dtype).requires_grad_() if value.is_floating_point() else value.to(device)

    return {name: leaf(value) for name, value in arguments.items()}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_outputs_states_and_gradients(case, device):
    arguments = drawn(**case)
    ours, truth = leaves(arguments, torch.float32, device), leaves(arguments, torch.float64, device)
    final = arguments["return_final_states"]
    got, expected = split_conv1d_scan(**ours), token_by_token(**truth)
    assert isinstance(got, tuple) == final
    got, expected = got if final else (got,), expected if final else expected[:1]
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape and a.dtype == torch.float32
    weights = [torch.randn(b.shape, generator=generator("cpu", number)).to(b) for number, b in enumerate(expected)]
    for results in (got, expected):
        sum((result * weight).sum() for result, weight in zip(results, weights, strict=True)).backward()
    pairs = {"out": (got[0], expected[0])} | ({"final_states": (got[1], expected[1])} if final else {})
    pairs |= {name: (ours[name].grad, t.grad) for name, t in truth.items() if isinstance(t, torch.Tensor) and t.requires_grad}
    for name, (a, b) in pairs.items():
        assert (a - b).norm() <= BOUND * b.norm(), name


def test_the_projection_under_autocast(device):
    arguments = leaves(drawn(), torch.float32, device)
    with torch.autocast(device, torch.bfloat16):
        out = split_conv1d_scan(**arguments)
    out.sum().backward()
    assert out.dtype == torch.bfloat16 and arguments["outproj_weight"].grad.dtype == torch.float32
    torch.testing.assert_close(out.float(), split_conv1d_scan(**arguments), rtol=0.05, atol=0.2)


BAD = {
    "zxbcdt": ({"zxbcdt": torch.zeros(2, 19, 3)}, ValueError, "zxbcdt: got 3 channels, expected 132"),
    "odd": ({"zxbcdt": torch.zeros(2, 19, 133)}, ValueError, "zxbcdt: got 133 channels, expected 132 .* by an even number"),
    "dimensions": ({"zxbcdt": torch.zeros(19, 132)}, ValueError, r"zxbcdt: got shape \(19, 132\), expected 3 dimensions"),
    "weight": ({"conv1d_weight": torch.zeros(97, 4)}, ValueError, "conv1d_weight: got 97 channels, expected 32 for x"),
    "no tensor": ({"D": None}, TypeError, "D: got NoneType, expected a tensor"),
    "headdim": ({"headdim": None}, ValueError, "headdim: got None, expected it to be given"),
    "outproj": ({"outproj_weight": None}, ValueError, "outproj_bias: got a tensor without outproj_weight"),
    "activation": ({"activation": "gelu"}, ValueError, "activation: got 'gelu'"),
    "A": ({"A": torch.zeros(3)}, ValueError, r"A: got shape \(3,\), expected \(4,\)"),
}


@pytest.mark.parametrize("changed, error, message", BAD.values(), ids=BAD)
def test_bad_arguments(changed, error, message):
    with pytest.raises(error, match=message):
        split_conv1d_scan(**drawn() | changed)
