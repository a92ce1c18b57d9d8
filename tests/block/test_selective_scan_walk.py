"""The walk's kernels without a GPU: their source run as Python, a program at a time, against the scan's definition in fp64.

On a GPU test_selective_scan runs the kernels themselves; a GPU's layouts, barriers and rounding are checked there alone.
"""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton import knobs

from ssd.block import selective_scan
from ssd.block.kernels.selective_scan_dispatch import takes_walk
from tests.block.test_selective_scan import Case, assert_right, inputs
from tests.executor import Executor
from tests.inputs import GPU

pytestmark = pytest.mark.skipif(GPU, reason="the kernels themselves run here")
WALK = "ssd.block.kernels.selective_scan_walk"
CASES = [
    Case(seqlen=40, dstate=4),
    Case(options=(), softplus=False, dim=66, ngroups=1),  # several programs, the last with channels to spare
    Case(options=("z",), ngroups=0, dim=5, dstate=16),
    Case(options=("D",), dstate=1, ngroups=3, seqlen=33),
    Case(batch=1, dim=1, seqlen=1, ngroups=1),
    Case(seqlen=17, decay=200.0),
    Case(seqlen=17, decay=16.0, even=True, softplus=False),
    Case(dim=34, seqlen=64, dstate=8, ngroups=1, dtype=torch.float16),  # all tiles are whole
]


@pytest.fixture
def walk(monkeypatch):
    names = WALK, f"{WALK}_fwd", f"{WALK}_bwd"
    modules = Executor(*names).modules
    shared, forward, backward = (modules[name] for name in names)
    monkeypatch.setattr(selective_scan, "selective_scan_walk_fwd", forward.selective_scan_walk_fwd)
    monkeypatch.setattr(selective_scan, "selective_scan_walk_bwd", backward.selective_scan_walk_bwd)
    monkeypatch.setattr(selective_scan, "takes_walk", lambda u, B: True)
    return shared, forward, backward


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_option(case, walk, device):
    assert_right(inputs(case, device))


@pytest.mark.parametrize("channels", (8, 16, 32))
def test_larger_warps(channels, walk, device, monkeypatch):
    """What more channels or longer sequences take."""
    for module in walk:
        monkeypatch.setattr(module, "channels_and_rows", lambda *sizes: (channels, 2 if channels == 32 else 1))
    assert_right(inputs(Case(dim=80, seqlen=35, dstate=16), device))


@pytest.mark.parametrize("batch, dim, ngroups, dstate, walks", (
    (8, 4096, 1, 16, True), (16, 32, 2, 1, True), (16, 31, 1, 16, False), (8, 4096, 1, 17, False), (8, 4096, 512, 16, False)))
def test_who_walks(batch, dim, ngroups, dstate, walks, monkeypatch):
    """Few states, many channels and no tiny groups, on a GPU; the interpreter never."""
    with FakeTensorMode():
        u, B = (torch.empty(*size, 1, device="cuda") for size in ((batch, dim), (batch, ngroups, dstate)))
    assert not takes_walk(u, B)
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    assert takes_walk(u, B) is walks
    assert not takes_walk(torch.empty(u.shape), torch.empty(B.shape))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not takes_walk(u, B)


def test_a_graph_without_gradients_is_for_every_batch(monkeypatch):
    """It has no states, which alone differ between walk and scans."""
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        batch = shapes.create_unbacked_symint()
        torch._check(batch >= 0)
        u, A, B = (torch.empty(size, device="cuda") for size in ((batch, 2048, 64), (2048, 16), (batch, 1, 16, 64)))
        out, last_state, states = selective_scan._forward_fake(u, u, A, B, B, None, None, None, True, False)
    assert out.shape == u.shape and last_state.shape == (batch, 2048, 16) and states.shape == (0,)
