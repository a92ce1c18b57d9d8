"""One block's roles as threads that hand a baton to each other, and the hardware's asynchronous work between them.

At each step of a role that others could notice, chance picks what goes on: a role that is not blocked, or a piece of work. Each
seed draws weights first, so that in one schedule copies are slow and in another a role is: equal weights would only give
schedules near the average.
"""

from __future__ import annotations

import linecache
import random
import sys
import threading
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

_WEIGHTS = (0.03, 1.0, 30.0)
_BLOCKS = threading.local()


class Fault(AssertionError):
    """What a GPU need not do as the kernel means it."""


class _Stopped(BaseException):
    """Ends a role after another one failed."""


@dataclass(eq=False)
class Line:
    """A role, and the line of the role's own function that it is at, in whatever helper."""

    role: str
    file: str
    number: int

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.number).strip()
        return f"{self.role} at {Path(self.file).name}:{self.number} `{text}`"


@dataclass(eq=False)
class Work:
    """Something asynchronous: `run` once, when chance says so or a wait for it, after the piece of work `after`."""

    name: str
    action: Callable[[], None]
    after: Work | None = None
    done: bool = False

    def run(self) -> None:
        if not self.done:
            if self.after is not None:
                self.after.run()
                self.after = None
            self.done = True
            self.action()


@dataclass
class Touched:
    """What blocks read and wrote, as addresses of storages."""

    read: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)

    def add(self, other: Touched) -> None:
        self.read |= other.read
        self.written |= other.written


def _make_baton() -> threading.Lock:
    """Not yet handed over. A lock is faster than a semaphore, and no baton is handed over twice."""
    baton = threading.Lock()
    baton.acquire()
    return baton


@dataclass(eq=False)
class Role:
    """A warp group of a block, or in a kernel without roles the whole of it.

    Attributes:
        clock: what the role knows to be over, as ticks of roles and phases of mbarriers; its own tick is how often its warps
            have met.
        open: its accesses to shared memory that are not yet over for others.
        products, stores: those in flight, oldest first.
        blocked: whether it may go on, and what it waits for, if it waits.
        alone: the launch before has ended, for all that the role knows.
    """

    name: str
    function: Callable
    is_partition: bool = True
    clock: dict[object, int] = field(default_factory=dict)
    open: list = field(default_factory=list)
    products: list = field(default_factory=list)
    stores: list = field(default_factory=list)
    blocked: tuple[Callable[[], bool], Callable[[], str], Line] | None = None
    finished: bool = False
    alone: bool = True
    baton: threading.Lock = field(default_factory=_make_baton)

    @property
    def tick(self) -> int:
        return self.clock.get(self, 0)

    def line(self) -> Line:
        """Where it is; called by the thread that runs it."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not self.function.__code__:
            frame = frame.f_back
        return Line(self.name, frame.f_code.co_filename, frame.f_lineno)


class Block:
    """A program of a launch. beside: what the launch before touched, if this one began before its end."""

    def __init__(self, number: int, programs: int, kernel: Callable, seed: object, beside: Touched | None = None):
        self.number, self.programs = number, programs
        self.beside, self.touched, self.lets_next_begin, self.has_waited = beside, Touched(), False, False
        self.chance = random.Random(str(seed))
        self.weights: dict[str, float] = defaultdict(lambda: self.chance.choice(_WEIGHTS))
        self.running = Role(kernel.__name__, kernel, is_partition=False, alone=beside is None)
        self.roles: list[Role] = []
        self.work: list[Work] = []
        self.barriers: list = []  # mbarriers that were made
        self.failure: BaseException | None = None

    def run(self, *args, **config) -> None:
        """The kernel, to its end."""
        _BLOCKS.current = self
        with torch.no_grad():
            self.running.function(*args, **config)

    def specialize(self, parts: list[tuple[Callable, tuple]]) -> None:
        """Runs functions with their arguments as roles, side by side; returns when all have ended."""
        kernel = self.running
        self.roles = [Role(f"role {n} ({function.__name__})", function, clock=dict(kernel.clock), alone=kernel.alone)
                      for n, (function, _) in enumerate(parts)]
        threads = [threading.Thread(target=self._play, args=(role, part[1]), daemon=True)
                   for role, part in zip(self.roles, parts, strict=True)]
        for thread in threads:
            thread.start()
        with torch.no_grad():
            self._next().baton.release()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        if any(not work.done for work in self.work):
            raise Fault("the block ended while copies into its shared memory were on their way")

    def pause(self) -> Role:
        """A step of the running role, at which others may go on first. Returns the role."""
        me = self.running
        if me.is_partition and (other := self._next()) is not me:
            self._hand_over(me, other)
        return me

    def wait(self, ready: Callable[[], bool], what: Callable[[], str]) -> Role:
        """Blocks the running role until `ready`. what: says what it waits for, if it does so in vain."""
        me = self.running
        if not me.is_partition:
            raise Fault(f"{me.line()}: waits for {what()} before any role runs")
        me.blocked = ready, what, me.line()
        self.pause()
        me.blocked = None
        return me

    def touch(self, t: Tensor, writes: bool) -> None:
        """The running role reads or writes global memory. The launch before may still write, and read what is written now."""
        at, role = t.untyped_storage().data_ptr(), self.running
        if not role.alone and (at in self.beside.written or (writes and at in self.beside.read)):
            does = "writes" if writes else "reads"
            raise Fault(f"{role.line()}: {does} what the launch before may still be at, whose end it has not waited for")
        (self.touched.written if writes else self.touched.read).add(at)

    def _play(self, role: Role, args: tuple) -> None:
        _BLOCKS.current = self
        role.baton.acquire()
        try:
            self._check()
            with torch.no_grad():  # a thread's own setting
                role.function(*args)
                if role.stores or role.products:
                    raise Fault(f"{role.name} ended without a wait for {(role.stores or role.products)[0].access}")
                role.finished = True
                if not all(other.finished for other in self.roles):
                    self._next().baton.release()
        except _Stopped:
            pass
        except BaseException as failure:
            self.failure = failure
            for other in self.roles:
                other.baton.release()

    def _hand_over(self, me: Role, other: Role) -> None:
        other.baton.release()
        me.baton.acquire()
        self._check()

    def _check(self) -> None:
        if self.failure is not None:
            raise _Stopped

    def _next(self) -> Role:
        """The role that chance lets run, after as much of the work as it likes."""
        while True:
            self.work = [work for work in self.work if not work.done]
            choices = [role for role in self.roles if not role.finished and (role.blocked is None or role.blocked[0]())]
            choices += [work for work in self.work if work.after is None or work.after.done]
            if not choices:
                raise Fault("deadlock:\n" + "\n".join(f"  {role.blocked[2]}: waits for {role.blocked[1]()}"
                                                      for role in self.roles if not role.finished))
            sums = list(accumulate([self.weights[choice.name] for choice in choices]))
            choice = choices[bisect(sums, self.chance.random() * sums[-1], hi=len(sums) - 1)]  # `choices` of random is slower
            if isinstance(choice, Role):
                self.running = choice
                return choice
            choice.run()


def block() -> Block:
    """The one that runs in this thread."""
    return _BLOCKS.current
