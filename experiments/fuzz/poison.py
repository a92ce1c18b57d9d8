"""Fresh memory that holds NaN, so that an output, or a partial sum, that a kernel leaves unwritten shows."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ssd.runtime import replay

_INTEGERS = 77


@contextmanager
def poison_memory() -> Iterator[None]:
    """Within it, what torch and launch replays allocate empty is NaN; integers are 77.

    The filling is hidden from dispatch modes: recording a call's launches gives up where it sees anything but allocations.
    """
    owners = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty"),
              (replay, "empty_strided"))
    with torch.device("meta"):
        torch.empty(0)  # torch notes once what makes tensors; the functions below must not be what it notes
    with ExitStack() as stack:
        for owner, name in owners:
            stack.enter_context(patch.object(owner, name, _poison(getattr(owner, name))))
        yield


def _poison(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def allocate_poisoned(*args, **kwargs):
        t = allocate(*args, **kwargs)
        if type(t) is Tensor:
            with torch.no_grad(), _disable_current_modes():
                t.detach().fill_(float("nan") if t.is_floating_point() else 0xFF if t.dtype == torch.uint8 else _INTEGERS)
        return t

    return allocate_poisoned
