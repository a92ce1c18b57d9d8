"""A message that GPUs of one host copy from each other, without a kernel: NCCL's take SMs from what runs beside them.

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

_ENABLED = is_on("SSD_PEER_COPIES", True)
_found: WeakKeyDictionary[dist.ProcessGroup, bool] = WeakKeyDictionary()


def can_copy(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the ranks can copy from each other. The first call for a group asks all of its ranks."""
    if device.type != "cuda" or dist.get_backend(group) != "nccl":
        return False
    if group not in _found:
        _found[group] = _ask(group, device)
    return _found[group]


def copy_from_all(t: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Callable[[], object]]:
    """What every rank has as t, one after the other, and what to call before it is read. `can_copy` has said yes.

    t: contiguous, with one axis, of the same size on every rank.
    """
    import torch.distributed._symmetric_memory  # which has the op

    received = torch.ops.symm_mem._low_contention_all_gather(t, group.group_name)
    return received, partial(torch.ops._c10d_functional.wait_tensor, received)


def _ask(group: dist.ProcessGroup, device: torch.device) -> bool:
    own = (socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)) if _ENABLED else None
    everyone = _tell(group, own)
    if None in everyone or len({host for host, _ in everyone}) > 1:
        return False
    here = {str(torch.cuda.get_device_properties(n).uuid): n for n in range(torch.cuda.device_count())}
    peers = [here.get(uuid) for _, uuid in everyone if uuid != own[1]]
    reached = all(n is not None and torch.cuda.can_device_access_peer(device, n) for n in peers)
    if not all(_tell(group, reached)):
        return False
    try:
        _, wait = copy_from_all(torch.zeros(16, device=device, dtype=torch.uint8), group)
        wait()
        works = True
    except RuntimeError as error:  # where the system lets no process see another's memory
        logging.getLogger("ssd").warning("context parallelism leaves its messages to NCCL: GPUs of this host cannot copy from "
                                         "each other: %s", str(error).splitlines()[0])
        works = False
    return all(_tell(group, works))


def _tell(group: dist.ProcessGroup, value: object) -> list:
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone
