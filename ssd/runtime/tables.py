"""Tables that kernels read, of runs, say, in a device's memory: made at the first call of a size, and kept while of use.

Of each device, the tables used last are kept, up to a number of entries and of bytes. None is freed while a kernel may read it:

    eager calls:  a table is used in one stream alone, the one in which it was allocated and copied to. Each stream has its own,
                  so torch gives the memory out again only behind the kernels that read it.
    recordings:   a recording of launches (`replay.py`) holds its tables and, in the same way, belongs to one stream.
    CUDA graphs:  a replay reads the addresses of its capture. What a capture uses is held for good.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from .toolchain import get_current_stream

# of a device; a table of tensors that fill 141 GB has at most 26 MB
_MOST_ENTRIES = 512
_MOST_BYTES = 32 << 20

Made = tuple  # tensors, and what goes with them

_held: dict[int, Tensor] = {}  # by id
_lock = threading.Lock()


class _Kept:
    """Tables of one device, by what made them, its settings and the stream; what was used last comes last."""

    def __init__(self):
        self.entries: OrderedDict[tuple, Made] = OrderedDict()
        self.nbytes = 0

    def add(self, key: tuple, made: Made) -> None:
        """Lets go of those used longest ago, until the others are within the bounds."""
        self.entries[key] = made
        self.nbytes += _count_bytes(made)
        while len(self.entries) > 1 and (len(self.entries) > _MOST_ENTRIES or self.nbytes > _MOST_BYTES):
            _, oldest = self.entries.popitem(last=False)
            self.nbytes -= _count_bytes(oldest)


_kept: dict[torch.device, _Kept] = {}


def get_tables(make: Callable[..., Made], settings: tuple, device: torch.device) -> Made:
    """make(*settings, device), for launches on the device's current stream. A GPU must be the current one.

    make: a module's function whose result depends on nothing but the settings, which are hashable.

    Raises:
        RuntimeError: a CUDA graph is being captured, and no call before it made this table.
    """
    with _lock:
        kept = _kept.setdefault(device, _Kept())
        if _is_capturing(device):
            return _hold_made(kept, make, settings)
        key = make, settings, _get_stream(device)
        made = kept.entries.get(key)
        if made is None:
            made = _make(make, settings, device)
            kept.add(key, made)
        else:
            kept.entries.move_to_end(key)
        return made


def hold(tables: tuple[Tensor, ...]) -> None:
    """Holds tables for good: a CUDA graph that is being captured will read them whenever it is replayed."""
    _held.update((id(table), table) for table in tables)


def _get_stream(device: torch.device) -> int:
    return get_current_stream(device.index) if device.type == "cuda" else 0


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _list_tables(made: Made) -> tuple[Tensor, ...]:
    return tuple(t for t in made if isinstance(t, Tensor))


def _count_bytes(made: Made) -> int:
    return sum(table.nbytes for table in _list_tables(made))


def _hold_made(kept: _Kept, make: Callable[..., Made], settings: tuple) -> Made:
    """Tables of any stream, held for good: a graph may be captured in another than the one it was warmed up in."""
    for (maker, of, _), made in kept.entries.items():
        if (maker, of) == (make, settings):
            hold(_list_tables(made))
            return made
    raise RuntimeError("the first call of these sizes came inside a CUDA-graph capture; call once before it, to warm up")


def _make(make: Callable[..., Made], settings: tuple, device: torch.device) -> Made:
    """In this stream, but another thread: what this one allocates may go to a graph's pool, as while torch.compile warms up
    for a graph, and what it computes may be traced or recorded. Tables are whole on return: launches that begin early read
    them before they wait for anything.
    """
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def run() -> Made:
        if stream is None:
            return make(*settings, device)
        with torch.cuda.stream(stream):
            made = make(*settings, device)
            stream.synchronize()
        return made

    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(run).result()

