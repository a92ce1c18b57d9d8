"""The TMA: copies of boxes between global and shared memory that take place when the schedule says so."""

from dataclasses import dataclass

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.executor.barriers import Barrier
from tests.executor.memory import Access, Buffer
from tests.executor.schedule import Fault, Work, block
from tests.executor.values import TRITON, Int


class Descriptor:
    """A host's TensorDescriptor, as a kernel sees it."""

    def __init__(self, host: TensorDescriptor):
        assert host.base.data_ptr() % 16 == 0, "a descriptor of memory that is not on 16 bytes"
        self.memory = host.base.as_strided(host.shape, host.strides)
        self.dtype, self.layout = TRITON[host.base.dtype], host.layout
        self.block_shape = tuple(map(Int, host.block_shape))

    def box(self, at: list[int], shape: tuple[int, ...]) -> tuple[Tensor, tuple[slice, ...]]:
        """What of the box from `at` on is in memory, and where in the box that is."""
        at = list(map(int, at))
        inside = [(max(0, -first), min(n, size - first)) for first, n, size in zip(at, shape, self.memory.shape, strict=True)]
        inside = [(first, max(first, last)) for first, last in inside]
        of_memory = tuple(slice(first + start, last + start) for start, (first, last) in zip(at, inside, strict=True))
        return self.memory[of_memory], tuple(slice(*edges) for edges in inside)

    def check(self, at: list[int], buffer: Buffer) -> None:
        assert all(isinstance(n, int) for n in at), f"coordinates {at}"
        fits = buffer.view.shape == self.block_shape and buffer.dtype == self.dtype
        assert fits, f"a box {self.block_shape} in {buffer.name}"


@dataclass(eq=False)
class CopyOut:
    work: Work
    access: Access


def copy_in(descriptor: Descriptor, at: list[int], barrier: Barrier, buffer: Buffer) -> None:
    """Global to shared; lands bytes on the barrier, in the phase in which it was issued. Zeros where there is no memory."""
    role = block().pause()
    descriptor.check(at, buffer)
    block().touch(descriptor.memory, writes=False)
    if not barrier.fenced:
        raise Fault(f"{role.line()}: no fence_async_shared followed the init of {barrier.name}")
    access = buffer.touch(role, "copy in", actor=barrier, over=barrier.phase + 1)
    buffer.view.fill_(float("nan"))
    barrier.copies += 1

    def land() -> None:
        if barrier.phase != access.over - 1:
            raise Fault(f"{access} landed after phase {access.over - 1} of {barrier.name}, on which it was to be counted")
        there, inside = descriptor.box(at, buffer.view.shape)
        buffer.view.zero_()
        buffer.view[inside] = there
        barrier.land(buffer.view.numel() * buffer.view.element_size())

    block().work.append(Work("copy in", land))


def copy_out(descriptor: Descriptor, at: list[int], buffer: Buffer) -> None:
    """Shared to global; the shared memory is read at any time until a wait. Nothing is written outside the tensor."""
    role = block().pause()
    descriptor.check(at, buffer)
    block().touch(descriptor.memory, writes=True)
    access = buffer.touch(role, "copy out")

    def write() -> None:
        there, inside = descriptor.box(at, buffer.view.shape)
        there.copy_(buffer.view[inside])

    work = Work("copy out", write)
    role.stores.append(CopyOut(work, access))
    block().work.append(work)


def wait_for_copies_out(most: int) -> None:
    """Until at most so many of the role's copies are yet to read shared memory. Its other warps know once they have met."""
    role = block().pause()
    done, role.stores = role.stores[: len(role.stores) - most], role.stores[max(0, len(role.stores) - most):]
    for copy in done:
        copy.work.run()
        copy.access.finished = True
