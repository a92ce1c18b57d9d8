"""Bytes, FLOPs, vector FLOPs and exponentials of every stage, and of the ideal operator: the only file with such formulas.

Element counts, in the names that the formulas use: X = batch seqlen nheads headdim, K = batch seqlen ngroups dstate,
D = batch seqlen nheads, S = batch nchunks nheads headdim dstate, M = batch nchunks ngroups chunk_size^2. `e` is the
size of an element of x in bytes, `s` that of a state kept between chunks; dt, decay and whatever is accumulated take 4.
A stage reads each of its tensors once and writes each once: a re-read that misses L2 is the kernel's own loss. Partial
sums, A, D and dt_bias are left out (under 1 %). A multiply and an add are two FLOPs. `flops` are those of matrix products;
`vector` the fp32 additions and multiplications besides, as the baseline's formulas have them, once: a tile that computes what
its neighbour does, and what the compiler adds, are not in it, so that it is the least that a kernel does. The ideal
operator's are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

_STAGE_TILE = 128  # rows per program where a baseline kernel skips what lies above the diagonal
_FLOOR_TILE = 64  # rows of the smallest tile that feeds the tensor cores; nothing finer skips exponentials


@dataclass(frozen=True)
class Cost:
    """What one stage, or a sum of stages, must do."""

    bytes: float = 0.0
    flops: float = 0.0
    exps: float = 0.0
    vector: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.flops + other.flops, self.exps + other.exps, self.vector + other.vector)


@dataclass(frozen=True)
class Ceilings:
    """What a device sustains, per second; a floor is a cost divided by one of these."""

    bytes: float
    flops: float
    exps: float

    def compute_floors_us(self, cost: Cost) -> tuple[float, float, float]:
        """The least time in microseconds for the memory, the tensor cores and the special function units."""
        return (1e6 * cost.bytes / self.bytes, 1e6 * cost.flops / self.flops, 1e6 * cost.exps / self.exps)


# Measured on one H200: a device-to-device copy, bytes read and written; an 8192-cubed bf16 matmul of random data.
# Exponentials by CUDA's throughput table: 16 per clock on each of 132 multiprocessors, at 1.755 GHz.
H200 = Ceilings(bytes=4.27e12, flops=790e12, exps=16 * 132 * 1.755e9)


@dataclass(frozen=True)
class Problem:
    """Sizes of one call.

    Attributes:
        itemsize: bytes of an element of x, B, C and dt.
        state_itemsize: bytes of an element of the states kept between chunks; None: itemsize.
        gated: whether z is given.
    """

    batch: int
    seqlen: int
    nheads: int
    headdim: int
    dstate: int
    ngroups: int
    chunk_size: int
    itemsize: int = 2
    state_itemsize: int | None = None
    gated: bool = False

    @property
    def nchunks(self) -> int:
        return -(-self.seqlen // self.chunk_size)

    @property
    def X(self) -> int:
        return self.D * self.headdim

    @property
    def K(self) -> int:
        return self.batch * self.seqlen * self.ngroups * self.dstate

    @property
    def D(self) -> int:
        return self.batch * self.seqlen * self.nheads

    @property
    def state(self) -> int:
        """Elements of one state of every sequence, such as final_states."""
        return self.batch * self.nheads * self.headdim * self.dstate

    @property
    def S(self) -> int:
        return self.nchunks * self.state

    @property
    def M(self) -> int:
        return self.batch * self.nchunks * self.ngroups * self.chunk_size**2

    def pairs(self, tile: int) -> float:
        """Query-key pairs per token of a causal chunk cut in square tiles, those above the diagonal skipped."""
        n = max(1, self.chunk_size // tile)
        return self.chunk_size * (n + 1) / (2 * n)


def total(stages: dict[str, Cost]) -> Cost:
    """The sum over stages."""
    return sum(stages.values(), Cost())


def count_forward_stages(p: Problem) -> dict[str, Cost]:
    """The baseline's five forward launches, in order. CB is counted as a full square, an upper bound."""
    X, K, D, S, M, N, Q = p.X, p.K, p.D, p.S, p.M, p.dstate, p.chunk_size
    e, s, pairs = p.itemsize, p.state_itemsize or p.itemsize, p.pairs(_STAGE_TILE)
    gate = e * X if p.gated else 0  # z read
    return {
        "chunk_cumsum": Cost((e + 8) * D, exps=D, vector=4 * D),
        "chunk_state": Cost(e * X + e * K + 8 * D + 4 * S, 2 * X * N, D, X + 2 * D),
        "state_passing": Cost((4 + s) * S + 4 * p.state, exps=S / (p.headdim * N), vector=2 * S),
        "bmm_chunk": Cost(2 * e * K + 4 * M, 2 * K * Q),
        "chunk_scan": Cost(2 * e * X + e * K + s * S + 4 * M + 8 * D + gate, 2 * X * N + 2 * X * pairs, D * pairs + D,
                           3 * D * pairs + 3 * X),
    }


def count_backward_stages(p: Problem, keeps_states: bool = False) -> dict[str, Cost]:
    """The baseline's backward launches, in order: forward stages again, then the gradients. bmm_bwd is two.

    Four stages are computed again, or two where the forward kept its states.

    dstates and dCB have x's element size; the first sums of dB and dC, dprev_states and CB take 4 bytes.
    """
    X, K, D, S, M, N, Q = p.X, p.K, p.D, p.S, p.M, p.dstate, p.chunk_size
    e, s, pairs = p.itemsize, p.state_itemsize or p.itemsize, p.pairs(_STAGE_TILE)
    left_out = ("chunk_scan", "chunk_state", "state_passing") if keeps_states else ("chunk_scan",)
    recomputed = {name: cost for name, cost in count_forward_stages(p).items() if name not in left_out}
    gate = {"chunk_scan_dz": Cost(5 * e * X, exps=X, vector=8 * X)} if p.gated else {}
    return {
        **recomputed,
        **gate,
        "chunk_scan_dstates": Cost(e * X + e * K + 4 * D + 4 * S, 2 * X * N, D, X),
        "state_passing_bwd": Cost((4 + s + e) * S, exps=S / (p.headdim * N), vector=4 * S),
        "chunk_scan_chunk_state_dx": Cost(3 * e * X + e * K + e * S + 4 * M + 16 * D, 2 * X * N + 2 * X * pairs, D * pairs + D,
                                          2 * D * pairs + 10 * X),
        "chunk_state_dB": Cost(e * X + 4 * K + e * S + 8 * D, 2 * X * N, D, X + 2 * D),
        "chunk_scan_dC": Cost(e * X + (e + 4) * K + s * S + 8 * D, 2 * X * N, D, X + 3 * D * N),
        "chunk_scan_dCB": Cost(2 * e * X + e * M + 8 * D, 2 * X * pairs, D * pairs, 4 * D * pairs),
        "bmm_bwd": Cost(2 * e * M + 2 * (2 * e + 4) * K, 4 * K * Q, vector=2 * K),
        "ddA_cumsum": Cost(2 * e * X + 4 * M + 16 * D, 2 * X * pairs, D * pairs, 6 * D * pairs),
        "chunk_cumsum_bwd": Cost((2 * e + 20) * D, exps=D, vector=10 * D),
    }


def count_ideal_forward(p: Problem) -> Cost:
    """One pass: x, dt, B, C read and y written once; products exactly causal; CB once per group."""
    X, K, D, N, Q, e = p.X, p.K, p.D, p.dstate, p.chunk_size, p.itemsize
    gate = e * X if p.gated else 0
    return Cost(2 * e * X + 2 * e * K + e * D + gate, 4 * X * N + X * Q + K * Q, D * p.pairs(_FLOOR_TILE))


def count_ideal_backward(p: Problem) -> Cost:
    """One pass: x, dt, B, C, dy read and dx, ddt, dB, dC written once; states at hand, CB once more per group."""
    X, K, D, N, Q, e = p.X, p.K, p.D, p.dstate, p.chunk_size, p.itemsize
    gate = 2 * e * X if p.gated else 0
    return Cost(3 * e * X + 4 * e * K + 2 * e * D + gate, 8 * X * N + 2 * X * Q + 3 * K * Q, D * p.pairs(_FLOOR_TILE))


def ideal(p: Problem, mode: str) -> Cost:
    """The ideal operator in a mode: fwd, fwd_train (a forward that a backward will follow), bwd or fwd_bwd."""
    match mode:
        case "fwd" | "fwd_train":
            return count_ideal_forward(p)
        case "bwd":
            return count_ideal_backward(p)
        case "fwd_bwd":
            return count_ideal_forward(p) + count_ideal_backward(p)
    raise ValueError(f"mode: got {mode!r}, expected fwd, fwd_train, bwd or fwd_bwd")
