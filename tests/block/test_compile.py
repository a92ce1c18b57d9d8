"""Kernels around the operator compile for GPUs that are not here and fit them; most load 16 bytes at a time."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import triton

from ssd.block.kernels.conv1d_bwd import _WARPS as BACKWARD_WARPS
from ssd.block.kernels.conv1d_bwd import conv1d_bwd
from ssd.block.kernels.conv1d_fwd import _WARPS as FORWARD_WARPS
from ssd.block.kernels.conv1d_fwd import conv1d_fwd
from ssd.block.kernels.conv1d_update import conv1d_update
from ssd.block.kernels.gated_norm import gated_norm, gated_norm_bwd
from ssd.block.kernels.residual_norm import Unscaled, residual_norm
from ssd.block.kernels.selective_scan import chunk_of
from ssd.block.kernels.selective_scan_bwd import selective_scan_bwd
from ssd.block.kernels.selective_scan_dispatch import TOKENS
from ssd.block.kernels.selective_scan_fwd import selective_scan_fwd
from ssd.block.kernels.selective_scan_walk_bwd import selective_scan_walk_bwd
from ssd.block.kernels.selective_scan_walk_fwd import selective_scan_walk_fwd
from ssd.block.kernels.state_update import state_update
from ssd.block.kernels.token_projections import MOST, project_in, project_out
from ssd.runtime.machine_code import lanes_apart
from tests.block import test_conv1d, test_gated_norm, test_selective_scan, test_state_update
from tests.programs import ROOT
from tools import tritons

# Of each case's chips, the last every time, the others where --triton is given.
NORMS = {  # name: width, group_size, dtype, gate, bias, chips. z is a slice of rows longer by a multiple of 8 alone
    "8b": (8192, 1024, torch.bfloat16, "before", False, (80, 90)),
    "8b, gate first": (8192, 1024, torch.bfloat16, "after", False, (90,)),
    "one group": (8192, 8192, torch.bfloat16, "before", False, (90,)),
    "three pieces": (1536, 1536, torch.bfloat16, "after", False, (80, 90)),
    "five pieces": (5120, 5120, torch.bfloat16, "after", False, (90,)),
    "odd": (640, 80, torch.bfloat16, "before", True, (80, 90)),
    "fp32": (8192, 1024, torch.float32, "before", False, (90,)),
}
TOKENS_OF = {  # name: d_model, nheads, ngroups, batch, chips. Heads of 64 channels with 128 states
    "130m": (768, 24, 1, 1, (80, 90)),
    "2.7b": (2560, 80, 1, 1, (90,)),
    "8b": (4096, 128, 8, MOST, (80, 90)),
}
TIED = test_state_update.TIED
UPDATES = {  # name: sizes, tied, indexed, state_dtype, chips
    "Mamba-2": ((4, 128, 8, 64, 128), TIED, True, torch.float32, (80, 90)),
    "Mamba-1": ((4, 1, 1, 4096, 16), (), False, torch.bfloat16, (80, 90)),
    "large": ((4, 24, 1, 64, 256), TIED, False, torch.bfloat16, (90,)),
    "odd": ((4, 4, 2, 20, 24), TIED, False, torch.float32, (80, 90)),
}
SCANS = {  # name: case, chips
    "mamba": (test_selective_scan.Case(2, 64, 2048, 16, 1, dtype=torch.bfloat16), (80, 100, 120, 90)),
    "vision": (test_selective_scan.Case(2, 160, 196, 8, 1, ("D", "delta_bias"), dtype=torch.bfloat16), (90,)),
    "large state": (test_selective_scan.Case(1, 10, 300, 256, 2), (120, 90)),
}
WALKS = {  # name: case, chips
    "mamba": (test_selective_scan.Case(1, 32768, 1024, 16, 1, dtype=torch.bfloat16), (80, 90)),
    "graphs": (test_selective_scan.Case(128, 96, 151, 16, 1, dtype=torch.bfloat16), (90,)),
    "vision": (test_selective_scan.Case(128, 160, 196, 8, 1, ("D", "delta_bias"), dtype=torch.bfloat16), (90,)),
    "odd": (test_selective_scan.Case(410, 40, 67, 5, 2), (120,)),
    "few": (test_selective_scan.Case(16, 128, 1400, 16, 1, dtype=torch.bfloat16), (90,)),
    "fewer than many": (test_selective_scan.Case(8, 600, 45, 12, 2, dtype=torch.bfloat16), (90,)),
    "few states": (test_selective_scan.Case(8, 100, 64, 3, 1, dtype=torch.bfloat16), (90,)),
}
CONVS = {  # name: case, chips. x is a slice of a projection whose width 16 divides, or, as that of 130m, 8 alone
    "8b": (test_conv1d.Case(dim=10240, packed=8320, dtype=torch.bfloat16), (80, 90)),
    "130m": (test_conv1d.Case(dim=1792, packed=1560, dtype=torch.bfloat16, parameter_dtype=torch.bfloat16), (90,)),
    "documents": (replace(test_conv1d.EVERYTHING, dim=1792, packed=1560, dtype=torch.bfloat16), (90,)),
    "continued": (replace(test_conv1d.CONTINUED, dim=10240, packed=8320), (80,)),
    "odd": (test_conv1d.Case(dim=131, packed=2, seqlen=1, width=2, dtype=torch.float16), (90,)),
}
# A case of each of these where another Triton than the locked one compiles: for all chips with --triton, else for its CHIPS.
FEW = (NORMS, "three pieces"), (UPDATES, "Mamba-2"), (SCANS, "vision"), (WALKS, "vision"), (CONVS, "8b"), (TOKENS_OF, "8b")
SHARED = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}  # bytes of shared memory that one block may ask for
REGISTERS = 65536  # of an SM


def compile_norm(width, group_size, dtype, gate, bias):
    x, weight, bias, z = test_gated_norm.inputs((300,), width, gate, bias, dtype, "cpu")
    z = test_gated_norm.lay_out(z, "packed+8")
    out, rstd = gated_norm(x, weight, bias, z, 1e-5, group_size, gate != "after", x.shape)
    for into in (None, z):  # packed, as z is
        gated_norm_bwd(out, x, weight, bias, z, rstd, group_size, gate != "after", into)


def compile_update(sizes, tied, indexed, state_dtype):
    state_update(*test_state_update.inputs(sizes, tied=tied, indexed=indexed, dtype=torch.bfloat16,
                                           state_dtype=state_dtype).values())


def compile_scan(case, forward=selective_scan_fwd, backward=selective_scan_bwd, tokens=None):
    """tokens: of a chunk, if the kernels have one length."""
    given = {**test_selective_scan.inputs(case, "cpu")}
    tensors = [given[name] for name in test_selective_scan.LEAVES]
    chunks = -(-case.seqlen // (tokens or chunk_of(case.seqlen, case.dstate)))
    states = torch.empty(case.batch, chunks, case.dim, case.dstate)
    forward(*tensors, case.softplus, True)
    backward(*tensors, case.softplus, states, torch.empty_like(given["u"]), states[:, 0])


def compile_walk(case):
    compile_scan(case, selective_scan_walk_fwd, selective_scan_walk_bwd, TOKENS)


def compile_conv(case):
    given = test_conv1d.inputs(case, "cpu")
    x, weight, bias, seq_idx, initial_states = (given[n] for n in ("x", "weight", "bias", "seq_idx", "initial_states"))
    numbers = torch.zeros(case.batch, dtype=torch.int32) if case.documents else None
    out, final_states = conv1d_fwd(x.mT, weight, bias, seq_idx, initial_states, True, case.final_states)
    for into in (None, x.mT):  # packed, as x is
        conv1d_bwd(x.mT, weight, bias, seq_idx, initial_states, True, out.mT, final_states, into)
    conv1d_update(x, torch.empty(case.batch, case.dim, 4, dtype=x.dtype), weight, bias, True, numbers, numbers,
                  torch.empty_like(x))


def compile_token(d_model, nheads, ngroups, batch):
    dtype, d_ssm, conv_dim = torch.bfloat16, 64 * nheads, 64 * nheads + 256 * ngroups

    def weight(*size):
        return torch.empty(size, dtype=dtype)

    residual, width = torch.empty(batch, d_model), d_ssm + conv_dim + nheads
    zxbcdt = project_in(residual, weight(d_model), 1e-5, weight(width, d_model), None, weight(batch, conv_dim, 3),
                        weight(conv_dim, 4), weight(conv_dim), d_ssm)
    project_out(zxbcdt[:, :d_ssm], weight(d_ssm), 1e-5, d_ssm // ngroups, weight(d_model, d_ssm), None, residual)
    residual_norm(residual, weight(batch, d_model), weight(d_model), 1e-5)
    for seqlen in (1, 100):
        added = Unscaled(weight(batch, seqlen, d_model), torch.empty(batch, 128, nheads), d_ssm, 1e-5)
        residual_norm(torch.empty(batch, seqlen, d_model), added, weight(d_model), 1e-5)


def main(few: list[int], every: bool):
    """few: chips to compile FEW for; none: everything for its own, for the last of them or for every one."""
    from tools.compile_kernels import collect_kernels, find_resources, use_installed_tools

    use_installed_tools()
    rows = []
    for compile_one, cases in ((compile_norm, NORMS), (compile_update, UPDATES), (compile_scan, SCANS), (compile_walk, WALKS),
                               (compile_conv, CONVS), (compile_token, TOKENS_OF)):
        for name, (*case, chips) in cases.items():
            for arch in () if few and (cases, name) not in FEW else few or chips[0 if every else -1 :]:
                with collect_kernels(arch) as found:
                    compile_one(*case)
                for kernel in found.values():
                    registers, spills = find_resources(kernel.kernel)
                    counted = {what: len(re.findall(what, kernel.asm["ptx"])) for what in
                               ("ld.global", "(?:ld|st).global.v[24]", "cp.async.c[ag]", "ex2.approx")}
                    rows.append({"triton": triton.__version__, "arch": arch, "case": name, "kernel": kernel.name,
                                 "warps": kernel.metadata.num_warps, "registers": registers, "spills": spills,
                                 "shared": kernel.metadata.shared, "apart": lanes_apart(kernel.asm["ptx"]), **counted})
    print(json.dumps(rows))


def compile_kernels(version, *given):
    """What `main` prints, from a process of its own: this one may interpret kernels. given: chips as numbers, or "every"."""
    done = subprocess.run([sys.executable, "-m", __name__, *map(str, given)], env=tritons.make_environment(version), cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0 and "error:" not in done.stderr, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_fits(rows, spills=0):
    """Nothing is spilled, or so many bytes, but by a walk outside its loops, by Triton 3.8 and 3.9 360 bytes; and by a norm of
    80 channels whose dz is packed.
    """
    most = {("mamba", "selective_scan_walk_bwd_kernel"): 360 if spills else 64,
            ("odd", "gated_norm_bwd_kernel"): 112 if spills else 56}
    for row in rows:
        assert row["spills"] <= max(spills, most.get((row["case"], row["kernel"]), 0)), row
        assert row["shared"] <= SHARED[row["arch"]], row
        assert not row["apart"], f"{row}: which of several lanes' sums is stored is left to chance"


@pytest.mark.other_tritons
def test_kernels_fit_with_other_tritons(triton, request):
    chips = SHARED if request.config.option.triton else tritons.CHIPS[triton]
    found = compile_kernels(triton, *chips)
    assert_fits(found, spills=8)  # sum_parts's, by the Blackwell ptxas of Triton 3.6
    assert {row["triton"] for row in found} == {triton}
    kernels = [{row["kernel"] for row in found if row["arch"] == arch} for arch in chips]
    assert all(one == kernels[0] for one in kernels) and len(kernels[0]) >= 12


def test_kernels_fit_and_load_wide(triton, request):
    """And what a launcher counts on to run side by side finds its registers and shared memory."""
    found = compile_kernels(triton, *(["every"] if request.config.option.triton else ()))
    assert_fits(found, spills=0 if found[0]["triton"].startswith("3.7.") else 24)  # 3.7 is the locked one
    side_by_side = {  # warps on an SM
        "conv1d_fwd_kernel": FORWARD_WARPS, "conv1d_bwd_kernel": BACKWARD_WARPS, "gated_norm_bwd_kernel": 16,
        "state_update_kernel": 32, "selective_scan_walk_fwd_kernel": 8, "selective_scan_walk_bwd_kernel": 8}
    assert side_by_side.keys() <= {row["kernel"] for row in found}
    for row in found:
        is_odd = "odd" in row["case"] or "few" in row["case"]
        blocks = side_by_side.get(row["kernel"], row["warps"]) // row["warps"]
        if not is_odd and row["arch"] == 90 and row["case"] != "documents":
            assert row["registers"] * 32 * row["warps"] * blocks <= REGISTERS, row
            assert (row["shared"] + 1024) * blocks <= SHARED[90] + 1024, row
        if row["kernel"].startswith(("gated_norm", "state_update", "conv1d_fwd", "conv1d_bwd", "project_")) and not is_odd:
            assert row["(?:ld|st).global.v[24]"] > 0, f"{row}: no thread loads several elements at once"
        if row["kernel"] in ("conv1d_fwd_kernel", "conv1d_bwd_kernel", "gated_norm_bwd_kernel") and not is_odd:
            assert row["cp.async.c[ag]"] > 0, f"{row}: the rows of the next steps are not under way"
        if row["kernel"] == "state_update_kernel" and not is_odd:
            tied = UPDATES[row["case"]][1]  # then one exponential is a head's
            assert (row["ex2.approx"] < 16) == bool(tied), row


if __name__ == "__main__":
    main(few=[int(chip) for chip in sys.argv[1:] if chip != "every"], every="every" in sys.argv)
