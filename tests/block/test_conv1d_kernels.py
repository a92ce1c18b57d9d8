"""The kernels of the causal convolution: how they cut their work, how far their offsets reach, what they compile to."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ssd.block.conv1d import causal_conv1d_fn
from ssd.block.kernels import conv1d
from ssd.block.kernels.conv1d import in_units, pieces
from ssd.block.kernels.conv1d_bwd import _WARPS as BACKWARD_WARPS
from ssd.block.kernels.conv1d_bwd import conv1d_bwd
from ssd.block.kernels.conv1d_fwd import _WARPS as FORWARD_WARPS
from ssd.block.kernels.conv1d_fwd import conv1d_fwd
from ssd.block.kernels.conv1d_update import conv1d_update
from ssd.runtime import tuning
from tests.block.test_conv1d import CONTINUED, EVERYTHING, Case, assert_right, inputs

pytestmark = pytest.mark.usefixtures("poison")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("case", (Case(dim=3), replace(EVERYTHING, dim=3, documents=(255, 45))), ids=str)
def test_longest_pieces(case, device, monkeypatch):
    """As on a GPU that has enough to do. The second document begins with the last token of a piece."""
    monkeypatch.setattr(conv1d, "_SHORTEST", 256)
    assert pieces(torch.empty(1, 262, 3, device=device), 1) == (256, 2)
    assert_right(inputs(replace(case, batch=1, seqlen=262), device))


def test_how_long_a_piece_is(monkeypatch):
    """Programs fill whole rounds of what runs side by side, here 40; few longer pieces, or more that leave less of it idle."""
    monkeypatch.setattr(tuning, "current_device", lambda index: tuning.Device("some", 0, sms=10))
    for (batch, seqlen, dim), expected in {(1, 1000, 128): (32, 32), (2, 1024, 640): (256, 4), (2, 1024, 512): (208, 5),
                                           (1, 1, 1): (32, 1), (40, 300, 1): (300, 1), (50, 1024, 1): (256, 4)}.items():
        assert pieces(torch.empty(batch, seqlen, dim, device="meta"), 4) == expected


def test_units_of_strides():
    """As wide as all strides allow: a projection of 130m is 3352 wide, which 8 divides and 16 does not."""
    packed, dense = torch.empty(2, 5, 3352)[..., 1536:3328], torch.empty(2, 5, 1792)
    assert in_units(packed) == (8, [(5 * 419, 419)])
    assert in_units(dense, packed) == (8, [(5 * 224, 224), (5 * 419, 419)])
    assert in_units(dense) == (16, [(5 * 112, 112)])
    assert in_units(dense[:1, :1].expand(2, 5, -1)) == (16, [(0, 0)])
    assert in_units(torch.empty(2, 5, 3)) == (1, [(15, 3)])


def test_offsets_beyond_int32(device):
    """Tokens 2^30 elements apart; no more than what they are in is touched."""
    memory = torch.UntypedStorage(2 * (3 * 2**30 + 20), device=device)
    x = torch.randn(1, 4, 20, device=device).half()
    far = torch.tensor([], dtype=x.dtype, device=device).set_(memory, 0, x.shape, (2**32, 2**30, 1)).copy_(x)
    weight = torch.randn(20, 4, device=device)
    for t in (far, x):
        t.requires_grad_()
        causal_conv1d_fn(t.mT, weight, activation="silu").backward(torch.ones(1, 20, 4, device=device).half())
    assert torch.equal(far.grad, x.grad)


COMPILED = {  # name: case, chips. x is a slice of a projection whose width 16 divides, or, as that of 130m, 8 alone
    "8b": (Case(dim=10240, packed=8320, dtype=torch.bfloat16), (80, 90)),
    "130m": (Case(dim=1792, packed=1560, dtype=torch.bfloat16, parameter_dtype=torch.bfloat16), (90,)),
    "documents": (replace(EVERYTHING, dim=1792, packed=1560, dtype=torch.bfloat16), (90,)),
    "continued": (replace(CONTINUED, dim=10240, packed=8320), (80,)),
    "odd": (Case(dim=131, packed=2, seqlen=1, width=2, dtype=torch.float16), (90,)),
}
REGISTERS = 65536  # of an SM
SHARED = {80: 164 * 1024, 90: 228 * 1024}  # bytes of shared memory of an SM, of which a block costs 1024 more than it has
KERNELS = {  # rows that are loaded ahead in a step, loads and stores of others, warps side by side
    "conv1d_fwd_kernel": (4, 3 + 4, FORWARD_WARPS),
    "conv1d_bwd_kernel": (4 + 4, 3 + 4 + 5, BACKWARD_WARPS),
}


def compile_all():
    """Forward, backward and one step for chips that need not be there."""
    from tests.compile_kernels import _resources, compiling, use_installed_tools

    use_installed_tools()
    rows = []
    for name, (case, chips) in COMPILED.items():
        given = inputs(case, "cpu")
        x, weight, bias, seq_idx, initial_states = (given[n] for n in ("x", "weight", "bias", "seq_idx", "initial_states"))
        conv_state = torch.empty(case.batch, case.dim, 4, dtype=x.dtype)
        numbers = torch.zeros(case.batch, dtype=torch.int32) if case.documents else None
        for arch in chips:
            with compiling(arch) as found:
                out, final_states = conv1d_fwd(x.mT, weight, bias, seq_idx, initial_states, True, case.final_states)
                conv1d_bwd(x.mT, weight, bias, seq_idx, initial_states, True, out.mT, final_states)
                conv1d_update(x, conv_state, weight, bias, True, numbers, numbers, torch.empty_like(x))
            for kernel in found.values():
                registers, spills = _resources(kernel.kernel)
                wide = re.findall(r"(?:ld|st)\.global\.v[24]\.b32", kernel.asm["ptx"])
                ahead = re.findall(r"cp\.async\.c[ag]\.", kernel.asm["ptx"])
                rows.append({"arch": arch, "case": name, "kernel": kernel.name, "registers": registers, "spills": spills,
                             "shared": kernel.metadata.shared, "wide": len(wide), "ahead": len(ahead)})
    print(json.dumps(rows))


def test_kernels_compile_and_fit():
    """In a process of its own: this one may interpret kernels. Nothing is spilled; where x is as models have it, each row is
    one load or store of a thread's 4 channels, those of the next steps are under way, and as many warps as a launcher counts
    on run side by side."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", __name__], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) == 4 * sum(len(chips) for _, chips in COMPILED.values())
    for row in rows:
        assert not row["spills"] and row["registers"] <= 255, row
        if row["kernel"] in KERNELS:
            ahead, others, warps = KERNELS[row["kernel"]]
            if row["case"] != "odd":
                assert row["ahead"] >= conv1d.STAGES * ahead and row["wide"] >= others, row
            if row["case"] in ("8b", "130m"):
                assert row["registers"] * 32 * warps <= REGISTERS, row
                assert (row["shared"] + 1024) * warps <= SHARED[row["arch"]], row


if __name__ == "__main__":
    compile_all()
