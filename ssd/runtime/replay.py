"""Launch replay: repeats the launches of a call without the Python around them, when a call of the same form was made before.

What a forward or backward launches depends on the form of its arguments alone: shapes, strides, dtypes, settings, and which of
them is late (`late.py`). The Python that works it out takes longer than the kernels of a small problem: 390 us of a backward
whose kernels take 180 (docs/log/launches.md). So the second call of a form is recorded: each launch with its arguments, and
where each of them lies. That is in a tensor that came in, in memory that was allocated, or elsewhere, as tables of runs do,
which the recording holds. A later call allocates results and scratch memory (`buffer_places.py`), launches the same with the
addresses of its own tensors, and gives the same bits. A recording belongs to one stream, as the tables do that it reads
(`tables.py`).

A call that does anything else to tensors than allocate, look at and launch is not recorded, nor is any of its form. Neither is
a call that has recorded calls in it.

`Options.replay` turns replay off for a call, the environment variable SSD_REPLAY=0 for a process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from .buffer_places import SCRATCH, Buffer, Place, check_apart, place_buffers
from .late import find_late, receive
from .launch import forget, record_launches
from .switches import is_on
from .tables import hold
from .toolchain import DescriptorAt, begins_early, get_current_stream, get_descriptor_fields, launch_compiled
from .tuning import is_forced

# as Inductor's code allocates, on the current device, in half the time of torch's function of that name
empty_strided = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None) or (
    lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device="cuda"))
_MOST = 1024  # forms; callers whose sizes never repeat must not fill the memory
_MOST_ADDRESSES = 8  # of an argument, whose descriptors are kept
_MOST_BYTES = 1 << 30  # allocated by a call: beyond, the kernels take longer than any Python
_MOST_TABLE_BYTES = 64 << 20  # of the tables that all recordings hold
_TOLD_APART = 16  # bytes, up to which launches tell alignments apart
_ONCE, _NEVER = "seen once", "cannot be recorded"
_ALLOCATING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_ENABLED = is_on("SSD_REPLAY", True)
_recordings: dict[tuple, Recording | str] = {}

Results = tuple["Tensor | None", ...]


def replay(call: Callable[..., Results], tensors: tuple[Tensor | None, ...], settings: tuple) -> Results:
    """call(*tensors, *settings), from its recording if there is one.

    call: allocates its results and launches on the device of the first tensor; settings: hashable, at one place always of one
    type.
    """
    if not _ENABLED or not tensors[0].is_cuda or is_forced():
        return call(*tensors, *settings)
    if isinstance(around := _get_current_dispatch_mode(), _Watch):
        around.give_up()
    addresses, forms = [], []
    for t in tensors:
        if t is None:
            addresses.append(0)
            forms.append(None)
        else:
            address = t.data_ptr()
            # which of two tensors at one address a launch meant cannot be told, so a form says which are
            same = addresses.index(address) if address in addresses else None
            forms.append((t.shape, t.stride(), t.dtype, t.get_device(), address % _TOLD_APART, same))
            addresses.append(address)
    stream = get_current_stream(tensors[0].get_device())
    awaited = find_late(addresses)
    key = call, settings, stream, awaited, *forms  # what waits for a state cannot begin as early
    found = _recordings.get(key)
    if isinstance(found, Recording):
        return found.play(tensors[0], addresses, stream, awaited)
    if found is _ONCE:
        results, found = _record(call, tensors, settings)
        _recordings[key] = found or _NEVER
        if found and found.tables and _count_table_bytes() > _MOST_TABLE_BYTES:
            _recordings.clear()
            _recordings[key] = found
        return results
    if found is None:
        if len(_recordings) >= _MOST:
            _recordings.clear()
        _recordings[key] = _ONCE  # what a first call compiles and keeps for good is none of its launches' own
    return call(*tensors, *settings)


def clear() -> None:
    """Forgets every recording."""
    _recordings.clear()


def has_recordings() -> bool:
    """True when a call was recorded, and not yet forgotten."""
    return any(isinstance(found, Recording) for found in _recordings.values())


def _count_table_bytes() -> int:
    """Bytes of the tables that all recordings hold, which may share some."""
    found = [recording for recording in list(_recordings.values()) if isinstance(recording, Recording)]
    tables = {id(table): table for recording in found for table in recording.tables}
    return sum(table.nbytes for table in tables.values())


class _Place(NamedTuple):
    """An argument of a launch: `offset` bytes into memory number `base`, of what came in, what is kept, and scratch memory."""

    at: int
    base: int
    offset: int
    descriptors: _Descriptors | None  # of a TMA descriptor


@dataclass(frozen=True)
class Recording:
    """What a call allocates, launches and returns."""

    kept: tuple[tuple, ...]  # shape, strides, dtype of what results lie in
    nbytes: int  # of the scratch memory
    launches: tuple[tuple, ...]  # compiled kernel, programs, arguments, places
    results: tuple[tuple | None, ...]  # which of those kept, and the view of it: shape, strides, offset, if it is not the whole
    tables: tuple[Tensor, ...]  # among the arguments, that lie elsewhere

    @property
    def held_bytes(self) -> int:
        """Bytes that a call holds at once: results and scratch memory."""
        elements = (1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0
                    for shape, strides, _ in self.kept)
        return self.nbytes + sum(n * dtype.itemsize for n, (_, _, dtype) in zip(elements, self.kept, strict=True))

    def play(self, like: Tensor, addresses: list[int], stream: int, awaited: int) -> Results:
        """The results of the call on tensors at these addresses, on the device of `like`, in the stream it was recorded in.

        awaited: which of them has no values yet, of `find_late`.
        """
        with torch.cuda.device_of(like):
            if self.tables and torch.cuda.is_current_stream_capturing():
                hold(self.tables)
            kept = [empty_strided(shape, strides, dtype) for shape, strides, dtype in self.kept]
            scratch = empty_strided((self.nbytes,), (1,), torch.uint8)
            bases = [*addresses, *[t.data_ptr() for t in kept], scratch.data_ptr()]
            for compiled, programs, args, places in self.launches:
                if awaited >= 0 and awaited in [place.base for place in places]:
                    receive()
                    awaited = -1
                args = list(args)
                for at, base, offset, descriptors in places:
                    address = bases[base] + offset
                    args[at] = address if descriptors is None else descriptors[address]
                launch_compiled(compiled, programs, stream, args)
        return tuple([None if r is None else kept[r[0]] if r[1] is None else kept[r[0]].as_strided(*r[1])
                      for r in self.results])


class _Descriptors(dict):
    """The descriptors of an argument by its address, which most often is one of a few: torch gives freed memory out again."""

    def __init__(self, fields: dict):
        super().__init__()
        self.fields = fields  # but for the tensor

    def __missing__(self, address: int) -> DescriptorAt:
        if len(self) >= _MOST_ADDRESSES:
            self.clear()
        made = self[address] = DescriptorAt(address, self.fields)
        return made


class _Watch(TorchDispatchMode):
    """What is allocated, and whether tensors are only allocated and looked at, and not too much of them."""

    def __init__(self):
        super().__init__()
        self.allocated: list[Tensor] = []  # held, so that no memory is given twice, as long as it matters
        self.nbytes, self.only = 0, True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        if self.only and not self._keep(func, args, results):
            self.give_up()
        return results

    def _keep(self, func, args: tuple, results) -> bool:
        """Notes what was allocated; whether the call can still be recorded."""
        if func.overloadpacket.__name__ in _ALLOCATING:
            self.allocated.append(results)
            self.nbytes += results.untyped_storage().nbytes()
            return self.nbytes <= _MOST_BYTES
        seen = {_get_memory(t) for t in args if isinstance(t, Tensor)}
        looked = results if isinstance(results, (tuple, list)) else (results,)
        return not func._schema.is_mutable and all(isinstance(t, Tensor) and _get_memory(t) in seen for t in looked)

    def give_up(self) -> None:
        """What was watched cannot be recorded, and is held no longer. To be called while it is the innermost."""
        self.only = False
        self.allocated.clear()
        forget()


def _get_memory(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _measure_extent(t: Tensor) -> int:
    """Bytes of memory from its beginning to the end of the last element of t, 0 if t has none; -1 if t begins later."""
    if t.storage_offset():
        return -1
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.itemsize if t.numel() else 0


def _record(call: Callable[..., Results], tensors: tuple[Tensor | None, ...],
            settings: tuple) -> tuple[Results, Recording | None]:
    """The results of the call, and its recording if there can be one."""
    with _Watch() as watch:
        results, launches = record_launches(call, *tensors, *settings)
    if not watch.only or launches is None:
        return results, None
    return results, _make_recording(tensors, results, launches, watch.allocated)


def _make_recording(tensors: tuple[Tensor | None, ...], results: Results, launches: list[tuple],
                    allocated: list[Tensor]) -> Recording | None:
    inside = {_get_memory(t): t for t in allocated}
    views: dict[int, list[Tensor]] = {}
    for t in results:
        if t is not None:
            if _get_memory(t) not in inside:  # an argument, or part of one
                return None
            views.setdefault(_get_memory(t), []).append(t)
    kept = []
    for memory, of in views.items():
        if len(of) == 1 and _measure_extent(of[0]) == inside[memory].untyped_storage().nbytes():
            kept.append((tuple(of[0].shape), of[0].stride(), of[0].dtype))  # no view, which autograd would let nobody change
        elif all(t.dtype == of[0].dtype for t in of):
            kept.append(((inside[memory].untyped_storage().nbytes() // of[0].itemsize,), (1,), of[0].dtype))
        else:
            return None
    bases = {memory: (len(tensors) + n, 0) for n, memory in enumerate(views)}  # number and offset of what was allocated
    buffers, nbytes = _place_scratch({m: t.untyped_storage().nbytes() for m, t in inside.items()}, [*views], launches)
    for memory, (room, offset) in buffers.items():
        bases[memory] = len(tensors) + (len(views) if room == SCRATCH else room), offset

    def view(t: Tensor) -> tuple:
        number = bases[_get_memory(t)][0] - len(tensors)
        whole = kept[number] == (t.shape, t.stride(), t.dtype)
        return number, None if whole else (t.shape, t.stride(), t.storage_offset())

    addresses = {t.data_ptr(): n for n, t in reversed([*enumerate(tensors)]) if t is not None}
    entered: dict[int, set[int]] = {}  # at which addresses arguments begin, by the memory that they are in
    for t in tensors:
        if t is not None:
            entered.setdefault(_get_memory(t), set()).add(t.data_ptr())
    steps, tables = [], {}
    for compiled, programs, args in launches:
        places = []
        for at, arg in enumerate(args):
            descriptors = None
            if hasattr(arg, "block_shape"):
                descriptors = _Descriptors(get_descriptor_fields(arg))
                arg = arg.base
            if not isinstance(arg, Tensor):
                continue
            memory, address = _get_memory(arg), arg.data_ptr()
            if memory in bases:
                base, start = bases[memory]
                offset = address - arg.untyped_storage().data_ptr() if arg.numel() else 0
                places.append(_Place(at, base, start + offset, descriptors))
            elif memory in entered:
                start = address
                if len(entered[memory]) == 1:  # a part of the tensor that came in
                    [start] = entered[memory]
                elif address not in addresses or not any(arg is t for t in tensors):
                    return None  # of one of several slices of the same memory, a part may begin where another slice does
                places.append(_Place(at, addresses[start], address - start if arg.numel() else 0, descriptors))
            else:
                tables[id(arg)] = arg
        steps.append((compiled, programs, _drop_places(args, places), tuple(places)))
    return Recording(tuple(kept), nbytes, tuple(steps), tuple(None if t is None else view(t) for t in results),
                     tuple(tables.values()))


def _place_scratch(allocated: dict[int, int], kept: list[int], launches: list[tuple]) -> tuple[dict[int, Place], int]:
    """Where each memory that was allocated and is not kept lies, if a launch uses it; and the bytes of the scratch memory.

    allocated: bytes of each memory; kept: the memory of results.
    """
    used: dict[int, list[int]] = {}
    begun = 0  # the launch with whose beginning the one at hand may begin
    for number, (compiled, _, args) in enumerate(launches):
        begun = begun if begins_early(compiled) else number
        for arg in args:
            arg = getattr(arg, "base", arg) if hasattr(arg, "block_shape") else arg
            if isinstance(arg, Tensor) and _get_memory(arg) in allocated:
                used.setdefault(_get_memory(arg), []).extend((begun, number))
    never = [0, len(launches)]  # what is kept and in no launch: its memory is not to be used

    def describe(memory: int) -> Buffer:
        numbers = used.get(memory, never)
        return Buffer(allocated[memory], min(numbers), max(numbers))

    memories = [memory for memory in used if memory not in kept]
    buffers, results = [describe(memory) for memory in memories], [describe(memory) for memory in kept]
    places, nbytes = place_buffers(buffers, results)
    check_apart(buffers, places, results)
    return dict(zip(memories, places, strict=True)), nbytes


def _drop_places(args: tuple, places: list[_Place]) -> tuple:
    """The arguments but for those that change, of which a recording must hold no memory."""
    changing = {place.at for place in places}
    return tuple(None if at in changing else arg for at, arg in enumerate(args))
