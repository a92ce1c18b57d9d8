"""Rows as the bench writes them, for tests that need some."""

from experiments import record
from experiments.shapes import SHAPES

ENVIRONMENT = {
    "git_sha": "0" * 40, "dirty": False, "gpu": "NVIDIA H200", "driver": "580.1", "torch": "2.13.0", "triton": "3.7.1",
    "sm_mhz": 1980, "time": "2026-01-01T00:00:00+00:00"}


def ssd_row(variant: str = "baseline", shape: str = "8b-b4", mode: str = "fwd", p50_us: float = 1000.0, **other) -> dict:
    """One row of the bench `ssd`; keywords replace any of its values."""
    return {
        "bench": "ssd", "variant": variant, "options": None, "mode": mode, "shape": shape, **SHAPES[shape].sizes,
        "dtype": "bf16", "chunk_size": 128, "p20_us": p50_us - 1, "p50_us": p50_us, "p80_us": p50_us + 1,
        "graph_p50_us": p50_us - 10, "launches": 5, "peak_mib": 512.0, "ideal_bytes": 608e6, "effective_gbps": 608.0,
        "copy_gbps": 4270.0, "sol": 0.142, "tflops": 107.0, "err_rms": 0.0021, "err_max": 0.0043, "err_seqlen": 4096,
        "note": None, **ENVIRONMENT,
    } | other


def compare(speedup: float = 1.25) -> dict:
    """The keys that a row has beside a rival's."""
    return {"against": "mamba_ssm", "against_p50_us": 1250.0, "against_graph_p50_us": 1237.5, "speedup": speedup,
            "graph_speedup": speedup}


def write(out, *rows: dict) -> None:
    for row in rows:
        record.append(row, out)


def kernel_row(kernel="chunk_scan_kernel", variant="baseline", mode="fwd", **other) -> dict:
    """One kernel of a call: 48 MB in 20 us, half of the H200's 4.8 TB/s."""
    identity = {key: ssd_row(variant, mode=mode)[key] for key in record.IDENTITY}
    return identity | ENVIRONMENT | {
        "bench": "counters", "kernel": kernel, "launches": 1, "ncu_us": 20.0, "dram_bytes": 48e6, "dram_pct": 50.0,
        "l2_hit_pct": 60.0, "occupancy_pct": 25.0, "registers": 128.0,
    } | other
