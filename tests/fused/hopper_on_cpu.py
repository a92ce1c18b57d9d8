"""The Hopper path without a GPU: its host code as it is, its kernels in the executor, all others in Triton's interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

from fused import hopper, hopper_backward, schedule, span_backward
from fused.time_model import Cut
from persistent import forward as persistent
from ssd.registry import get_variant
from ssd.runtime import tables
from ssd.runtime.tuning import Device
from tests.executor import Executor

KERNELS = tuple(f"fused.kernels.hopper.{name}"
                for name in ("ring", "start", "scan_tiles", "masks", "document_states", "scan", "wide_scan", "walks", "states",
                             "pieces", "factors", "group_tiles", "group", "ends", "pairs"))


@contextmanager
def hopper_on_cpu(executor: Executor, blocks: int = 4, cut: tuple | None = None,
                  splits: int | None = None) -> Iterator[None]:
    """Variants take the Hopper path.

    blocks: that run side by side. cut: fields of a `Cut` of each sequence; None: as `schedule` chooses it.
    splits: of a group's heads in the backward, likewise.
    """
    def choose(owner: object, name: str, value: object):
        return patch.object(owner, name, lambda *args: value)

    def get_tables(*args):
        """What is launched for them has ended."""
        beside, found = executor.beside, tables.get_tables(*args)
        executor.beside = beside
        return found

    device = Device("test", 232448, blocks)
    choose_splits = schedule.choose_splits
    choose_splits.cache_clear()
    for name in ("fused", "persistent"):
        get_variant(name)  # or each use would import it anew, which `install` forgets
    try:
        with (executor.install(), patch.dict(tables._kept, clear=True), choose(hopper, "is_hopper", True),
              patch.object(hopper, "get_tables", get_tables),
              choose(hopper, "current_device", device), choose(persistent, "device_of", device),
              choose(hopper_backward, "current_device", device),
              choose(schedule, "_choose_cut", Cut(*cut)) if cut else nullcontext(),
              choose(hopper_backward, "choose_splits", splits) if splits else nullcontext(),
              choose(span_backward, "choose_splits", splits) if splits else nullcontext()):
            yield
    finally:
        choose_splits.cache_clear()
