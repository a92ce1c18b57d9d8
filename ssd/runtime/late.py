"""A tensor that is passed on before its values are there: the first launch that is given it waits for them.

What a call launches before that one runs while the values are on their way, from another GPU, say.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


class _Late(threading.local):
    """Address of the tensor that is awaited in this thread, or 0; and what brings its values."""

    address: int = 0
    bring: Callable[[], None] | None = None


late = _Late()


@contextmanager
def deliver_late(t: Tensor | None, bring: Callable[[], None]) -> Iterator[None]:
    """Within, `bring` is called before the first launch that is given t, or else at the end, unless there was an error.

    t: contiguous. Only launches that are given it, not a descriptor of it, may read it before `bring` was called.
    """
    late.address, late.bring = 0 if t is None else t.data_ptr(), bring
    try:
        yield
        if late.bring is not None:
            receive()
    finally:
        late.address, late.bring = 0, None


def find_late(addresses: Sequence[int]) -> int:
    """Which of these addresses is that of the tensor whose values are not there yet; -1 if none is."""
    return addresses.index(late.address) if late.address and late.address in addresses else -1


def includes_late(values: Sequence[object]) -> bool:
    """Whether one of these is the tensor whose values are not there yet."""
    return late.address != 0 and find_late([value.data_ptr() for value in values if isinstance(value, Tensor)]) >= 0


def receive() -> None:
    """Brings the values."""
    bring, late.address, late.bring = late.bring, 0, None
    with _disable_current_modes():  # so that a recording of the call has no part in it
        bring()
