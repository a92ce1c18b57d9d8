"""Variant `persistent`: the forward in long-lived thread blocks; the backward is that of `fused`, whose long part is persistent."""

from fused.backward import backward
from ssd.registry import Variant
from ssd.variant import VARIANT as BASELINE

from .forward import forward, states_every

VARIANT = Variant("persistent", supports=BASELINE.supports, forward=forward, backward=backward,
                  options=("exp2", "low_precision_states", "low_precision_CB", "fuse_bmm", "stationary", "segments", "gluon",
                           "save_states"), states_every=states_every)
