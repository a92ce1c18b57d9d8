"""Kernels by the units that they use: tensor cores only, vector units only, or both (Table II of "Characterizing the Behavior
of Training Mamba-based State Space Models on GPUs", 2025, which is "the paper" in this package).

A unit counts as used if it does more than a threshold of the kernel's FLOPs. A threshold of 0 will not do, since nearly every
kernel adds something up; so it is stated, and swept. FLOPs are those counted by ncu where a row has them, else the cost
model's, which has the least that a kernel does on the vector units: with counters more kernels will be of both.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ssd import cost

from .definitions import count_vector_flops, make_problem

TENSOR, VECTOR, BOTH, UNKNOWN = "tensor only", "vector only", "tensor + vector", "not known"
THRESHOLD = 0.01
THRESHOLDS = (0.0, 0.001, 0.003, 0.005, 0.01, 0.03, 0.1)
RECOMPUTED = ("chunk_cumsum", "chunk_state", "state_passing", "bmm_chunk")  # of the forward, again in the backward


@dataclass(frozen=True)
class Work:
    """FLOPs of one kernel. source: `counters`, or `cost model`; None where neither knows it."""

    tensor: float
    vector: float
    source: str | None

    def uses(self, threshold: float) -> str:
        """One of the classes."""
        least = threshold * (self.tensor + self.vector)
        used = (self.tensor > least, self.vector > least)
        return {(True, False): TENSOR, (False, True): VECTOR, (True, True): BOTH}.get(used, UNKNOWN)

    @property
    def ratio(self) -> float | None:
        """Tensor over vector FLOPs, Figure 3; None without vector FLOPs."""
        return self.tensor / self.vector if self.vector else None


def name_stage(kernel: dict) -> str:
    """The stage of the cost model that a kernel computes, by its name: the baseline's, and some of upstream's."""
    return kernel["kernel"].removesuffix("_kernel").removesuffix("_fwd").removeprefix("_")


def read_counters(kernel: dict) -> Work | None:
    """What ncu counted; None where it did not."""
    vector = count_vector_flops(kernel)
    return None if vector is None or "tensor_flops" not in kernel else Work(kernel["tensor_flops"], vector, "counters")


def work(kernel: dict) -> Work:
    """What a row of the bench `counters` did."""
    if (by_ncu := read_counters(kernel)) is not None:
        return by_ncu
    modelled = model(kernel)
    return Work(0.0, 0.0, None) if modelled is None else Work(modelled.flops, modelled.vector, "cost model")


def model(kernel: dict) -> cost.Cost | None:
    """The cost model's account of a row's kernel; None if it is none of its stages."""
    problem = make_problem(kernel)
    return (cost.count_forward_stages(problem) | cost.count_backward_stages(problem)).get(name_stage(kernel))


def compute_shares(kernels: Iterable[dict], threshold: float = THRESHOLD,
                   recomputed: bool = True) -> dict[str, tuple[int, float]]:
    """{class: (how many kernels, per cent of their time)}; without `recomputed`, of the backward's own kernels alone."""
    kept = [kernel for kernel in kernels if recomputed or name_stage(kernel) not in RECOMPUTED]
    total = sum(kernel["ncu_us"] for kernel in kept)
    result = {}
    for name in (TENSOR, VECTOR, BOTH, UNKNOWN):
        of_class = [kernel["ncu_us"] for kernel in kept if work(kernel).uses(threshold) == name]
        result[name] = (len(of_class), 100 * sum(of_class) / total if kept else 0.0)
    return result
