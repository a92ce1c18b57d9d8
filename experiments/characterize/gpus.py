"""What data sheets say of GPUs, in gpus.json: a source for each number. Rates are dense and at the boost clock."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ssd.runtime.tuning import device_slug

from ..record import group_by

EXPS_PER_CLOCK = 16  # of one SM: CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions"


@dataclass(frozen=True)
class Cell:
    """A number and where it is from. confidence: `sheet`, `derived`, or `range`, the lower end of what is published."""

    value: float
    source: str
    confidence: str = "sheet"


@dataclass(frozen=True)
class GPU:
    """One GPU.

    Attributes:
        hbm_gbps: GB/s of its memory.
        bf16_tflops: of the tensor cores, without sparsity, accumulating in fp32.
        fp32_tflops: of the vector units, a fused multiply-add counted as two.
        fp32_lanes: of one SM.
    """

    name: str
    sms: Cell
    hbm_gbps: Cell
    bf16_tflops: Cell
    fp32_tflops: Cell
    l2_mb: Cell
    fp32_lanes: Cell

    @property
    def clock_ghz(self) -> float:
        """The clock at which fp32_tflops hold."""
        return self.fp32_tflops.value * 1e3 / (2 * self.fp32_lanes.value * self.sms.value)

    @property
    def exps_per_s(self) -> float:
        return EXPS_PER_CLOCK * self.sms.value * self.clock_ghz * 1e9


GPUS = {key: GPU(sheet.pop("name"), **{what: Cell(*cell) for what, cell in sheet.items()})
        for key, sheet in json.loads(Path(__file__).with_suffix(".json").read_text()).items()}


def find(name: str | None) -> GPU | None:
    """The GPU of a row's `gpu`, `NVIDIA H200`, say; None if it is not in the table."""
    return GPUS.get(device_slug(name)) if name else None


def name_gpu(name: str) -> str:
    """As the table calls the GPU of a row's `gpu`; the row's own name where it is not in the table."""
    gpu = find(name)
    return gpu.name if gpu else name


def split_by_gpu(rows: Iterable[dict]) -> dict[str, list[dict]]:
    """The rows of each GPU, by its name, in the table's order; those that are not in it come last."""
    order, groups = list(GPUS), group_by(rows, lambda row: row["gpu"])

    def place(name: str) -> tuple:
        slug = device_slug(name)
        return order.index(slug) if slug in GPUS else len(order), name

    return {name_gpu(name): groups[name] for name in sorted(groups, key=place)}
