"""Variant `persistent`: the forward in long-lived thread blocks; the backward as in `fused`."""

from fused.backward import backward
from ssd.baseline.variant import VARIANT as BASELINE
from ssd.registry import Variant

from .forward import forward, states_every

VARIANT = Variant("persistent", supports=BASELINE.supports, forward=forward, backward=backward,
                  options=("exp2", "low_precision_states", "low_precision_CB", "fuse_bmm", "stationary", "segments", "gluon",
                           "save_states", "fuse_backward"), states_every=states_every)
