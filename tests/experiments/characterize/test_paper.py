"""What stands beside the papers' numbers: whose kernels, and why ours differ."""

from pathlib import Path

from experiments.characterize import definitions
from experiments.characterize.report import paper
from tests.experiments.characterize.counted import STEP, kernel_row
from tests.experiments.rows import write


def beside_the_papers(what: str, out: Path) -> tuple[str, str]:
    """Our number and the difference, from the row that begins so."""
    return next(row[2:] for row in paper.compare(definitions.calls(out), out) if row[0].startswith(what))


def test_reasons_that_repeat_are_said_once():
    rows, notes = paper.share_reasons([("x", "1", "2", "one; both"), ("y", "1", "2", "both"), ("z", "1", "2", "")])
    assert [row[-1] for row in rows] == ["one (a)", "(a)", ""] and notes == ["**(a)** both."]
    assert paper.share_reasons([("x", "1", "2", "one")]) == ([("x", "1", "2", "one")], [])


def test_shares_of_busy_time_beside_the_papers(tmp_path):
    """5 % of a step of which a half is idle are 10 % of the rest; where little is idle that goes unsaid."""
    def step(time, **shares):
        write(tmp_path, *(STEP | {"bench": "characterize", "workload": "graphmamba", "phase": "", "us": 1.0, "steps": 3,
                                  "time": time, "operator": kind, "share": share} for kind, share in shares.items()))
        return beside_the_papers("GEMM in GraphMamba", tmp_path)

    ours, why = step("2000", gemm=0.05, ssm=0.45, idle=0.5)
    assert ours.startswith("5 % (graphmamba ") and ours.endswith("; 10 % of the time in which the GPU is busy")
    assert why.startswith("our GPU is idle for 50 % of that step, ")
    ours, why = step("2100", gemm=0.8, idle=0.2)
    assert "busy" not in ours and why.startswith("sizes, batches and versions differ")


def test_upstreams_kernels_beside_the_papers(tmp_path):
    """Where they were counted in both modes, without what upstream leaves to torch; 50 % of 4800 GB/s are 72 % of an H100's."""
    counted = {"tensor_flops": 1600.0, "fadds": 100.0, "fmuls": 0.0, "ffmas": 0.0}
    torchs = kernel_row("void at::reduce_kernel", "mamba_ssm", "bwd", dram_bytes=1.0, **counted)
    write(tmp_path, kernel_row(), kernel_row("_chunk_scan_fwd_kernel", "mamba_ssm", **counted))
    assert beside_the_papers("bandwidth", tmp_path)[0].startswith("the baseline, ")
    write(tmp_path, torchs, kernel_row("_chunk_state_fwd_kernel", "mamba_ssm", "bwd", **counted),
          kernel_row("_bmm_chunk_bwd_kernel", "mamba_ssm", "bwd", **counted | {"fadds": 0.0}))
    ours, why = beside_the_papers("bandwidth", tmp_path)
    assert ours == "mamba_ssm, of the data sheet's peak: forward U 50.0 %, W 50.0 %; backward U 50.0 %, W 50.0 %"
    assert why.endswith("no kernel beyond an H100's peak, U would be 72 % and 72 % of that")
    write(tmp_path, kernel_row("_chunk_scan_fwd_kernel", "mamba_ssm", dram_bytes=96e6, time="2100", **counted))
    assert "U would be 100 % and 72 % of that" in beside_the_papers("bandwidth", tmp_path)[1]
    ours, why = beside_the_papers("Table II, backward, tensor only", tmp_path)
    assert ours == "1: 100.00 % (mamba_ssm)", "of the backward's own: chunk_state is the forward's, again"
    assert "cost model" not in why and "; here " not in why
    write(tmp_path, kernel_row("_chunk_scan_bwd_dc_kernel", "mamba_ssm", "bwd", **counted | {"fadds": 0.5}))
    ours, why = beside_the_papers("Table II, backward, tensor only", tmp_path)
    assert ours == "2: 100.00 % (mamba_ssm)" and why.endswith("; here _bmm_chunk_bwd, _chunk_scan_bwd_dc (3200 : 1)")
    assert beside_the_papers("kernels of both", tmp_path)[0] == "mamba_ssm: 0 of 3; the lowest 16"
