"""Memory that the GPUs of one host copy from each other, without a kernel: NCCL's kernels take SMs from what runs beside them.

`SSD_PEER_COPIES=0` in the environment leaves all messages to NCCL.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..runtime.switches import is_on
from ..runtime.tuning import next_power_of_2

_ENABLED = is_on("SSD_PEER_COPIES", True)
_LEAST_BYTES = 1 << 20
_TIMEOUT_MS = 600_000  # NCCL's default: after it, a GPU whose peers do not come ends with an error
_Windows = dict[tuple[torch.device, int], "Window"]  # by device and bytes
_can_copy: WeakKeyDictionary[dist.ProcessGroup, bool] = WeakKeyDictionary()
_windows: WeakKeyDictionary[dist.ProcessGroup, _Windows] = WeakKeyDictionary()  # as long as the group: CUDA graphs know them


class Window:
    """Memory of each rank of a group that the others can read, for one message at a time."""

    def __init__(self, group: dist.ProcessGroup, nbytes: int, device: torch.device):
        from torch.distributed import _symmetric_memory as symmetric

        # not `symmetric.empty`, whose pool may put several into one segment, with signals in common
        self._own = symmetric._SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
        self._handle = symmetric.rendezvous(self._own, group.group_name)
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._rank = dist.get_rank(group)
        self._all = [self._handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(dist.get_world_size(group))]
        self._over: torch.cuda.Event | None = None  # the last message outside of captures

    def open(self, nbytes: int) -> Tensor:
        """Where to write a message of so many bytes."""
        if self._over is not None and not torch.cuda.is_current_stream_capturing():
            self._wait(self._over)
        return self._own[:nbytes]

    def send(self, received: Tensor) -> tuple[Callable[[], None], Callable[[], None]]:
        """Begins to copy every rank's message into received, (ranks, nbytes). Returns wait, to be called before it is read, and
        release, to be called after the last launch beside it.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._own.device))
        received[self._rank].copy_(self._own[: received.shape[1]])  # by a kernel, so while there are SMs for it
        with torch.cuda.stream(self._stream):
            self._handle.barrier(timeout_ms=_TIMEOUT_MS)  # all have written
            for rank, theirs in enumerate(self._all):
                if rank != self._rank:
                    received[rank].copy_(theirs[: received.shape[1]])
            there = self._stream.record_event()
            self._handle.barrier(timeout_ms=_TIMEOUT_MS)  # all have read
            over = self._stream.record_event()
        self._over = None if torch.cuda.is_current_stream_capturing() else over
        return partial(self._wait, there), partial(self._wait, over)

    def _wait(self, event: torch.cuda.Event) -> None:
        event.wait(torch.cuda.current_stream(self._own.device))


def gather_objects(group: dist.ProcessGroup, value: object) -> list:
    """Every rank's value, in the order of ranks."""
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def find_window(group: dist.ProcessGroup, nbytes: int, device: torch.device) -> Window | None:
    """A window of at least so many bytes; None where ranks cannot copy from each other, and in a capture before which none was
    made. All ranks must ask for the same number of bytes: the first time they exchange addresses. Groups are of NCCL on GPUs,
    whatever they are on CPUs: torch names the backend of a group of both after neither.
    """
    if "cuda:nccl" not in dist.get_backend_config(group).split(",") or device.type != "cuda":
        return None
    windows, size = _windows.setdefault(group, {}), max(_LEAST_BYTES, next_power_of_2(nbytes))
    if (device, size) not in windows and not torch.cuda.is_current_stream_capturing() and _ask(group, device):
        windows[device, size] = Window(group, size, device)
    return windows.get((device, size))


def has_window(group: dist.ProcessGroup) -> bool:
    """Whether this rank has copied a message of the group."""
    return bool(_windows.get(group))


def _ask(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks can copy from each other. They are asked once."""
    if group not in _can_copy:
        _can_copy[group] = _is_one_host(group, device) and all(gather_objects(group, _try_window(group, device)))
    return _can_copy[group]


def _is_one_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether each rank sees, and reaches, the GPUs of all, and has no windows of another group: torch counts the exchanges of
    addresses by process, and ranks that have made unlike many of them would wait for each other in vain.
    """
    own = None
    if _ENABLED and not any(_can_copy.values()):
        own = socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)
    everyone = gather_objects(group, own)
    if None in everyone or len({host for host, _ in everyone}) > 1:
        return False
    here = {str(torch.cuda.get_device_properties(n).uuid): n for n in range(torch.cuda.device_count())}
    peers = [here.get(uuid) for _, uuid in everyone if uuid != own[1]]
    return all(gather_objects(group, all(n is not None and torch.cuda.can_device_access_peer(device, n) for n in peers)))


def _try_window(group: dist.ProcessGroup, device: torch.device) -> bool:
    try:
        Window(group, 16, device)
    except RuntimeError as error:  # the system may let no process see another's memory
        logging.getLogger("ssd").warning("context parallelism leaves its messages to NCCL: GPUs of this host cannot copy from "
                                         "each other: %s", str(error).splitlines()[0])
        return False
    return True
