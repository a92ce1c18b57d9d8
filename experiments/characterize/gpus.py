"""What data sheets say of GPUs, a source for each number. Rates are dense and at the boost clock."""

from __future__ import annotations

from dataclasses import dataclass

from ssd.runtime.tuning import device_slug

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


_A100 = "NVIDIA A100 80GB data sheet, SXM column"
_AMPERE = "NVIDIA A100 Tensor Core GPU Architecture white paper"
_H100 = "NVIDIA H100 data sheet, SXM column"
_HOPPER = "NVIDIA H100 Tensor Core GPU Architecture white paper"
_H200 = "NVIDIA H200 data sheet, SXM column"
_B200 = "NVIDIA HGX B200 data sheet, an eighth of its eight GPUs"
_ADA = "NVIDIA Ada GPU Architecture white paper"

GPUS = {
    "a100": GPU("A100-80 SXM", Cell(108, _AMPERE), Cell(2039, _A100), Cell(312, _A100), Cell(19.5, _A100), Cell(40, _AMPERE),
                Cell(64, _AMPERE)),
    "h100": GPU("H100 SXM", Cell(132, _HOPPER), Cell(3350, _H100), Cell(989, _H100), Cell(66.9, _H100), Cell(50, _HOPPER),
                Cell(128, _HOPPER)),
    "h200": GPU("H200", Cell(132, "torch.cuda.get_device_properties"), Cell(4800, _H200), Cell(989, _H200), Cell(66.9, _H200),
                Cell(50, f"{_HOPPER}; torch reads 60 on this GPU", "derived"), Cell(128, _HOPPER)),
    "b200": GPU("B200", Cell(148, "torch.cuda.get_device_properties, as published by others", "derived"), Cell(8000, _B200),
                Cell(2250, _B200), Cell(75, f"{_B200}: 75 to 80 by edition", "range"),
                Cell(126, "cudaDeviceProp::l2CacheSize, as published by others", "derived"), Cell(128, _HOPPER, "derived")),
    "rtx_4090": GPU("RTX 4090", Cell(128, _ADA), Cell(1008, _ADA), Cell(165, _ADA), Cell(82.6, _ADA), Cell(72, _ADA),
                   Cell(128, _ADA)),
}


def find(name: str | None) -> GPU | None:
    """The GPU of a row's `gpu`, `NVIDIA H200`, say; None if it is not in the table."""
    return GPUS.get(device_slug(name)) if name else None
