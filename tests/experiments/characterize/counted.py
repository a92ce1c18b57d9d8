"""Rows of counters and of times that belong together, for tests."""

from experiments import record
from tests.experiments.rows import ENVIRONMENT, ssd_row

STEP = {"workload": "mamba2", "preset": "1.3b", "mixer": "ssd", "variant": "fused", "dtype": "bf16", "batch": 4,
        "run": {"documents": False}, **ENVIRONMENT}


def kernel_row(kernel="chunk_scan_kernel", variant="baseline", mode="fwd", **other) -> dict:
    """One kernel of a call: 48 MB in 20 us, half of the H200's 4.8 TB/s."""
    identity = {key: ssd_row(variant, mode=mode)[key] for key in record.IDENTITY}
    return identity | ENVIRONMENT | {
        "bench": "counters", "kernel": kernel, "launches": 1, "ncu_us": 20.0, "dram_bytes": 48e6, "dram_pct": 50.0,
        "l2_hit_pct": 60.0, "occupancy_pct": 25.0, "registers": 128.0,
    } | other
