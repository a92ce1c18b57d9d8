"""mbarriers: counts, bytes and phases, and what a wait for one tells."""

from tests.executor.schedule import Fault, Role, block
from tests.executor.values import Int


class Barrier:
    """An mbarrier in shared memory; `init` makes it one.

    Attributes:
        phase: how many phases it has completed.
        pending, bytes: arrivals and bytes that the current phase waits for.
        copies: that were issued in the current phase and have not landed.
        told: for each completed phase, what those who arrived in it or before knew.
    """

    def __init__(self, name: str = "mbarrier"):
        self.name, self.count, self.fenced = name, 0, False
        self.phase = self.pending = self.bytes = self.copies = 0
        self.told: list[dict] = []
        self.clock: dict = {}

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, role: Role, count: int) -> None:
        if count > self.pending:
            raise Fault(f"{role.line()}: {count} arrivals at {self.name}, whose phase {self.phase} lacks {self.pending}")
        _learn(self.clock, role.clock)
        self.pending -= count
        self._complete()

    def expect(self, role: Role, bytes: int) -> None:
        self.bytes += bytes
        self.arrive(role, 1)

    def land(self, bytes: int) -> None:
        self.bytes -= bytes
        self.copies -= 1
        self._complete()

    def wait(self, parity: int) -> None:
        """Until the phase of that parity has completed.

        It passes whenever the current phase has the other parity. All that the role can be sure of then is the first such phase
        after those that it knew to be completed; so no more is learned, however far the barrier has come.
        """
        parity = int(parity)

        def passes() -> bool:
            return self.phase & 1 != parity

        role = block().wait(passes, lambda: f"a phase of parity {parity} of {self}")
        known = role.clock.get(self, 0)
        if known & 1 == parity:
            _learn(role.clock, self.told[known])

    def _complete(self) -> None:
        if self.pending or self.bytes:
            return
        if self.copies:
            raise Fault(f"{self.name}: phase {self.phase} is complete with {self.copies} copies on their way: "
                        "fewer bytes were expected than copied")
        self.phase += 1
        self.pending = self.count
        _learn(self.clock, {self: self.phase})
        self.told.append(dict(self.clock))

    def __str__(self) -> str:
        return f"{self.name} (phase {self.phase} lacks {self.pending} of {self.count} arrivals and {self.bytes} bytes)"


class BarrierArray:
    """mbarriers in a row, as `allocate_shared_memory` gives them."""

    def __init__(self, number: int):
        self.barriers, self.shape = [Barrier() for _ in range(number)], (Int(number), Int(1))

    def index(self, n: int) -> Barrier:
        n = int(n)
        if not 0 <= n < len(self.barriers):
            raise Fault(f"{block().running.line()}: mbarrier {n} of {len(self.barriers)}")
        return self.barriers[n]


def _learn(clock: dict, other: dict) -> None:
    for actor, tick in other.items():
        if clock.get(actor, 0) < tick:
            clock[actor] = tick
