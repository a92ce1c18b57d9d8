"""Shared memory, and whether what touches it comes after what touched it before.

An access is over for others from a tick of its role's clock, or a phase of an mbarrier, on. Who comes next must know that tick
or phase: because its own warps met since, or through an mbarrier on which the other arrived afterwards. So most faults show in
every schedule, whichever of the two happens to come first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon import language as real

from tests.executor.schedule import Fault, Line, Role, block
from tests.executor.values import TORCH, TRITON, Int, Value

UNNAMED = "shared memory"


@dataclass(eq=False)
class Access:
    """Of bytes `start` to `stop` of an allocation.

    Attributes:
        kind: "load" or "store", ordinary ones; "product" or "copy out", asynchronous reads; "copy in".
        actor: whose clock tells when it is over: the role, or of a copy in the mbarrier that it completes on.
        finished: of a load, what it brought has been used; of a product or a copy out, the role has waited for it.
        fenced: of a store, a fence between the proxies has followed it.
        elements: of an ordinary one, which of its thread's elements are which of the memory's.
        ordered: tick from which the role's own ordinary accesses come after it: its warps have met.
        over: tick from which anything may come after it. visible: from which a store comes before products and copies.
    """

    kind: str
    line: Line
    name: str
    start: int
    stop: int
    actor: object
    elements: tuple | None = None
    finished: bool = False
    fenced: bool = False
    ordered: int | None = None
    over: int | None = None
    visible: int | None = None

    def __str__(self) -> str:
        return f"the {self.kind} of {self.name} by {self.line}"

    @property
    def writes(self) -> bool:
        return self.kind in ("store", "copy in")

    @property
    def by_proxy(self) -> bool:
        """By the asynchronous proxy, which sees what was stored before a fence alone."""
        return self.kind in ("product", "copy out", "copy in")

    def is_over_for(self, role: Role, later: Access) -> bool:
        """Whether `later` may touch what this one did, for all that the role, which issues it, knows."""
        known = role.clock.get(self.actor, 0)
        if self.kind == "store" and later.by_proxy:
            return self.visible is not None and self.visible <= known
        if self.actor is role and self.elements and later.elements:  # a thread's own accesses stay in order
            same_thread = self.elements == later.elements
            if same_thread or (self.kind == "load" and self.ordered is not None):
                return True
        return self.over is not None and self.over <= known

    def why(self, later: Access) -> str:
        """What it lacks to be over for `later`, as a reader of a fault needs it."""
        if self.kind == "copy in":
            return "of whose landing this role has not been told"
        if self.over is None and not self.finished:
            return "which may still be on its way"
        if self.over is None:
            return "which no barrier of its warps has followed"
        if self.kind == "store" and later.by_proxy and self.visible is None:
            return "between which and the barrier of its warps no fence_async_shared was"
        return "of whose end this role has not been told: nobody was at an mbarrier after it, or after the barrier of its warps"


def _cover(writes: list[Access], access: Access) -> bool:
    """Whether these, together, are to all of what the access is to."""
    reached = access.start
    for write in sorted(writes, key=lambda write: write.start):
        if write.start <= reached:
            reached = max(reached, write.stop)
    return reached >= access.stop


class Allocation:
    """Elements, and the accesses to them that later ones must come after."""

    def __init__(self, dtype: real.dtype, shape: list[int]):
        self.name, self.dtype = UNNAMED, dtype
        self.elements = torch.full(shape, float("nan"), dtype=TORCH[dtype])
        self.accesses: list[Access] = []

    def touch(self, role: Role, access: Access) -> None:
        """Adds the access, which the role issues now.

        Raises:
            Fault: one before it is not over, or it reads what nothing has written.
        """
        before = [a for a in self.accesses if a.start < access.stop and access.start < a.stop]
        for a in before:
            if (a.writes or access.writes) and not a.is_over_for(role, access):
                raise Fault(f"{access} comes before the end of {a}, {a.why(access)}")
        if access.writes:
            self.accesses = [a for a in self.accesses if a.start < access.start or access.stop < a.stop]
        elif not _cover([a for a in before if a.writes], access):
            raise Fault(f"{access} reads what nothing has written")
        self.accesses.append(access)


class Buffer:
    """A view of an allocation."""

    def __init__(self, allocation: Allocation, view: Tensor, name: str = ""):
        self.allocation, self.view, self._name = allocation, view, name
        self.dtype = TRITON[view.dtype]

    @property
    def shape(self) -> tuple[Int, ...]:
        return tuple(map(Int, self.view.shape))

    @property
    def name(self) -> str:
        return self.allocation.name + self._name

    def index(self, n: int) -> Buffer:
        n = int(n)
        if not 0 <= n < self.view.shape[0]:
            raise Fault(f"{block().running.line()}: {self.name}[{n}] of {self.view.shape[0]}")
        return Buffer(self.allocation, self.view[n], f"{self._name}[{n}]")

    def slice(self, start: int, length: int, dim: int = 0) -> Buffer:
        return Buffer(self.allocation, self.view.narrow(dim, start, length), f"{self._name}[{int(start)}:{start + length}]")

    def permute(self, order: tuple[int, ...]) -> Buffer:
        return Buffer(self.allocation, self.view.permute(order), self._name)

    def reinterpret(self, dtype: real.dtype, shape: list[int], layout: object) -> Buffer:
        elements = self.view.view(-1).view(TORCH[dtype])[: math.prod(shape)]  # all, or the first
        return Buffer(self.allocation, elements.view(tuple(shape)), self._name)

    _reinterpret = reinterpret

    def load(self, layout: object) -> Value:
        role = block().pause()
        access = self.touch(role, "load", layout)
        return Value(self.view.clone(), layout, () if access is None else (access,))

    def store(self, value: Value) -> None:
        role = block().pause()
        tensor = value.take_tensor()
        assert tensor.shape == self.view.shape and value.dtype == self.dtype, f"{value.dtype} {tensor.shape} into {self.name}"
        self.touch(role, "store", value.layout)
        self.view.copy_(tensor)

    def touch(self, role: Role, kind: str, layout: object = None, actor: object = None,
              over: int | None = None) -> Access | None:
        """Notes an access that the role issues. Outside of roles the compiler's barriers keep order, so that only stores are
        noted, for accesses inside of them to find.
        """
        if not role.is_partition and kind != "store":
            return None
        size, elements = self.view.element_size(), self.view.numel()
        start = self.view.storage_offset() * size
        extent = elements if self.view.is_contiguous() else 1 + sum(
            (n - 1) * stride for n, stride in zip(self.view.shape, self.view.stride(), strict=True))
        if extent > elements and kind == "store":
            for row in range(self.view.shape[0]):
                self.index(row).touch(role, kind, layout)
            return None
        # what is read with gaps counts as read with what is between
        assert extent == elements or kind in ("load", "product"), "copies in with gaps are not modelled"
        of_threads = layout and (layout, self.dtype, self.view.shape, self.view.stride())
        access = Access(kind, role.line(), self.name, start, start + extent * size, actor or role, of_threads, over=over)
        access.finished = kind == "store"
        if not role.is_partition:
            access.over = 0  # roles begin after it
        self.allocation.touch(role, access)
        if over is None:
            role.open.append(access)
        return access


def meet(role: Role) -> None:
    """A barrier of the role's warps: what each of them did comes before what any of them does."""
    tick = role.clock[role] = role.tick + 1
    for access in role.open:
        if access.kind in ("load", "store") and access.ordered is None:
            access.ordered = tick
        if access.finished:
            access.over, access.visible = tick, tick if access.fenced else None
    role.open = [access for access in role.open if access.over is None]


def fence(role: Role) -> None:
    """Between the proxies: what was stored before it comes before products and copies, once the warps have met."""
    for access in role.open:
        access.fenced |= access.kind == "store"
        if not role.is_partition:  # roles begin after it
            access.visible = 0
