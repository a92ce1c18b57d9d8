"""Kernels around the operator compile for GPUs that are not here and fit them; most load 16 bytes at a time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from triton import knobs

from ssd.block.kernels.conv1d_bwd import conv1d_bwd
from ssd.block.kernels.conv1d_fwd import conv1d_fwd
from ssd.block.kernels.conv1d_update import conv1d_update
from ssd.block.kernels.gated_norm import gated_norm, gated_norm_bwd
from ssd.block.kernels.selective_scan import chunk_of
from ssd.block.kernels.selective_scan_bwd import selective_scan_bwd
from ssd.block.kernels.selective_scan_choice import TOKENS
from ssd.block.kernels.selective_scan_fwd import selective_scan_fwd
from ssd.block.kernels.selective_scan_walk_bwd import selective_scan_walk_bwd
from ssd.block.kernels.selective_scan_walk_fwd import selective_scan_walk_fwd
from ssd.block.kernels.state_update import state_update
from ssd.runtime.machine_code import inspect, lanes_apart, ptx_loops, read
from tests import tritons
from tests.block import test_gated_norm, test_selective_scan, test_state_update

ROOT = Path(__file__).parents[2]
NORMS = {  # name: width, group_size, dtype, gate, bias, chips. z is a slice of rows longer by a multiple of 8 alone
    "8b": (8192, 1024, torch.bfloat16, "before", False, (80, 90)),
    "8b, gate first": (8192, 1024, torch.bfloat16, "after", False, (90,)),
    "one group": (8192, 8192, torch.bfloat16, "before", False, (90,)),
    "three pieces": (1536, 1536, torch.bfloat16, "after", False, (80, 90)),
    "five pieces": (5120, 5120, torch.bfloat16, "after", False, (90,)),
    "odd": (640, 80, torch.bfloat16, "before", True, (80, 90)),
    "fp32": (8192, 1024, torch.float32, "before", False, (90,)),
}
TIED = test_state_update.TIED
UPDATES = {  # name: sizes, tied, indexed, state_dtype, chips
    "Mamba-2": ((4, 128, 8, 64, 128), TIED, True, torch.float32, (80, 90)),
    "Mamba-1": ((4, 1, 1, 4096, 16), (), False, torch.bfloat16, (80, 90)),
    "large": ((4, 24, 1, 64, 256), TIED, False, torch.bfloat16, (90,)),
    "odd": ((4, 4, 2, 20, 24), TIED, False, torch.float32, (80, 90)),
}
SCANS = {  # name: case, chips
    "mamba": (test_selective_scan.Case(2, 64, 2048, 16, 1, dtype=torch.bfloat16), (80, 90, 100, 120)),
    "vision": (test_selective_scan.Case(2, 160, 196, 8, 1, ("D", "delta_bias"), dtype=torch.bfloat16), (90,)),
    "large state": (test_selective_scan.Case(1, 10, 300, 256, 2), (90, 120)),
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
LOOPS = {  # of walks, instructions for a token, channel and state: in the forward's loop, in the two of the backward together
    "mamba": (6.0, 22.0), "graphs": (6.5, 25.0), "vision": (7.5, 27.0), "odd": (7.5, 28.5),
    "few": (11.5, 41.0), "fewer than many": (8.0, 29.0), "few states": (77.0, 37.0),
}
CONVS = {"mamba": (torch.bfloat16, (80, 90)), "fp32": (torch.float32, (90,))}  # name: dtype, chips
# A case of each of these, for all chips, where another Triton than the locked one compiles.
FEW = (NORMS, "three pieces"), (UPDATES, "Mamba-2"), (SCANS, "vision"), (WALKS, "vision"), (CONVS, "mamba")
SHARED = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}  # bytes of shared memory that one block may ask for
REGISTERS = 65536  # of an SM


def compile_norm(width, group_size, dtype, gate, bias):
    x, weight, bias, z = test_gated_norm.inputs((300,), width, gate, bias, dtype, "cpu")
    z = test_gated_norm.strided(z, "packed+8")
    out, rstd = gated_norm(x, weight, bias, z, 1e-5, group_size, gate != "after", x.shape)
    gated_norm_bwd(out, x, weight, bias, z, rstd, group_size, gate != "after")


def compile_update(sizes, tied, indexed, state_dtype):
    state_update(*test_state_update.inputs(sizes, tied=tied, indexed=indexed, dtype=torch.bfloat16,
                                           state_dtype=state_dtype).values())


def compile_scan(case):
    given = {**test_selective_scan.inputs(case, "cpu")}
    tensors = [given[name] for name in test_selective_scan.LEAVES]
    chunks = -(-case.seqlen // chunk_of(case.seqlen, case.dstate))
    states = torch.empty(case.batch, chunks, case.dim, case.dstate)
    selective_scan_fwd(*tensors, case.softplus, True)
    selective_scan_bwd(*tensors, case.softplus, states, torch.empty_like(given["u"]), states[:, 0])


def compile_walk(case):
    given = {**test_selective_scan.inputs(case, "cpu")}
    tensors = [given[name] for name in test_selective_scan.LEAVES]
    states = torch.empty(case.batch, -(-case.seqlen // TOKENS), case.dim, case.dstate)
    selective_scan_walk_fwd(*tensors, case.softplus, True)
    selective_scan_walk_bwd(*tensors, case.softplus, states, torch.empty_like(given["u"]), states[:, 0])


def compile_conv(dtype):
    x, state, bias = torch.empty(4, 300, 640, dtype=dtype), torch.empty(4, 3, 640, dtype=dtype), torch.empty(640)
    weight, documents = torch.empty(640, 4), torch.zeros(4, 300, dtype=torch.int32)
    conv1d_fwd(x, weight, bias, documents, state, True, True)
    conv1d_bwd(x, weight, bias, documents, state, True, torch.empty_like(x), state)
    conv1d_update(x[:, :1].mT, state.mT, weight, bias, True, None, None, torch.empty(4, 640, 1, dtype=dtype))


def main(few: list[int]):
    """few: chips to compile FEW for; none: everything for its own."""
    from tests.compile_kernels import _resources, compiling, use_installed_tools

    use_installed_tools()
    rows = []
    for compile_one, cases in ((compile_norm, NORMS), (compile_update, UPDATES), (compile_scan, SCANS), (compile_walk, WALKS),
                               (compile_conv, CONVS)):
        for name, (*case, chips) in cases.items():
            for arch in () if few and (cases, name) not in FEW else few or chips:
                with compiling(arch) as found:
                    compile_one(*case)
                for kernel in found.values():
                    registers, spills = _resources(kernel.kernel)
                    counted = {what: kernel.asm["ptx"].count(what) for what in
                               ("ld.global.", "ld.global.v4", "st.global.v4", "cp.async.cg", "ex2.approx")}
                    rows.append({"triton": triton.__version__, "arch": arch, "case": name, "kernel": kernel.name,
                                 "warps": kernel.metadata.num_warps,
                                 "registers": registers, "spills": spills, "shared": kernel.metadata.shared,
                                 "barriers": _innermost_barriers(kernel.asm["ptx"]), "loops": _loops(kernel),
                                 "apart": lanes_apart(kernel.asm["ptx"]), **counted})
    print(json.dumps(rows))


def _innermost(loops):
    return [(first, last) for first, last in loops
            if not any((first, last) != loop and first <= loop[0] and loop[1] <= last for loop in loops)]


def _innermost_barriers(ptx: str) -> int:
    """Barriers of a block in loops that have no loop inside."""
    lines, loops = ptx_loops(ptx)
    return sum("bar.sync" in line for first, last in _innermost(loops) for line in lines[first:last])


def _loops(kernel) -> list[float]:
    """Of a walk, instructions of its innermost loops for a token, channel and state; one pass is a turn of four tokens."""
    names = kernel.src.fn.arg_names
    sizes = {names[path[0]]: value for path, value in kernel.src.constants.items()}
    if "R" not in sizes:
        return []
    _, loops = read(inspect(knobs.nvidia.nvdisasm.path, "-c", kernel.kernel))
    return [(last - first + 1) * 32 / (4 * sizes["CHANNELS"] * sizes["N"]) for first, last in sorted(_innermost(loops))]


def compiled(version, few=()):
    """What `main` prints, from a process of its own: this one may interpret kernels."""
    done = subprocess.run([sys.executable, "-m", __name__, *map(str, few)], env=tritons.environment(version), cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0 and "error:" not in done.stderr, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_fits(rows, spills=0):
    """Nothing is spilled, or so many bytes, but by a walk outside its loops."""
    for row in rows:
        assert row["spills"] <= (64 if row["case"] == "mamba" and "walk_bwd" in row["kernel"] else spills), row
        assert row["shared"] <= SHARED[row["arch"]], row
        assert not row["apart"], f"{row}: which of several lanes' sums is stored is left to chance"


@pytest.mark.other_tritons
def test_kernels_fit_with_other_tritons(triton):
    found = compiled(triton, tuple(SHARED))
    assert_fits(found, spills=8)  # sum_parts's, by the Blackwell ptxas of Triton 3.6
    assert {row["triton"] for row in found} == {triton}
    kernels = [{row["kernel"] for row in found if row["arch"] == arch} for arch in SHARED]
    assert all(one == kernels[0] for one in kernels) and len(kernels[0]) >= 12


def test_kernels_fit_and_load_wide(triton):
    """And what runs side by side finds its registers and shared memory."""
    found = compiled(triton)
    assert_fits(found)
    rows = {kernel: [row for row in found if row["kernel"] == f"{kernel}_kernel"]
            for kernel in ("gated_norm", "gated_norm_bwd", "state_update")}
    assert list(map(len, rows.values())) == [10, 10, 7]
    scans = [row for row in found if row["kernel"].startswith("selective_scan") and not row["loops"]]
    assert len(scans) == 3 * 7
    for row in scans:
        # a warp walks its channel alone: none waits for another inside the loop over states, unless these are very many
        assert "grads" in row["kernel"] or row["case"] == "large state" or row["barriers"] == 0, row

    walks = [row for row in found if row["loops"]]
    assert len(walks) == 2 * 8
    for row in walks:
        backward = "bwd" in row["kernel"]
        unrolled = backward and row["case"] in ("few", "few states")  # by ptxas, which leaves the loop as it was behind that
        assert len(row["loops"]) == (2 if backward else 1) + unrolled, row
        assert sum(row["loops"][-2:]) <= LOOPS[row["case"]][backward], row
        assert row["arch"] != 90 or (row["shared"] + 1024) * 8 <= SHARED[90], f"{row}: eight programs on an SM, the whole model"

    for row in rows["gated_norm"] + rows["gated_norm_bwd"]:
        assert row["ld.global."] == row["ld.global.v4"] > 0 or row["case"] == "odd", row
    for row in rows["gated_norm"]:
        if "pieces" in row["case"]:
            # of x and z, 2 bytes an element, as many are under way as with whole powers of two: 120 KiB on an SM or more
            row_bytes = 2 * 2 * NORMS[row["case"]][1]
            assert REGISTERS // (32 * row["warps"] * -(-row["registers"] // 8) * 8) * row_bytes >= 120 * 1024, row
    for row in rows["gated_norm_bwd"]:
        side_by_side = 16 // row["warps"]  # programs on an SM, as the launcher counts on
        assert row["registers"] * 32 * row["warps"] * side_by_side <= REGISTERS, row
        assert row["shared"] * side_by_side <= SHARED[row["arch"]], row
        assert row["cp.async.cg"] >= 9, f"{row}: dout, x and z of the next tiles are not under way"

    for row in rows["state_update"]:
        _, tied, _, state_dtype, _ = UPDATES[row["case"]]
        assert row["registers"] <= 64, row  # eight programs of four warps on an SM
        if row["case"] == "odd":  # a lane holds one element of a row
            continue
        assert row["ld.global.v4"] >= row["st.global.v4"] == state_dtype.itemsize, row  # 16 elements of the state a thread
        assert (row["ex2.approx"] < 16) == bool(tied), row  # one exponential for a head, or one for each element


if __name__ == "__main__":
    main(few=[int(chip) for chip in sys.argv[1:]])
