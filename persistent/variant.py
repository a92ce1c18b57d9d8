"""Variant `persistent`: the forward in long-lived thread blocks; for now the baseline's backward."""

from ssd.backward import backward
from ssd.registry import Variant
from ssd.variant import VARIANT as BASELINE

from .forward import forward

VARIANT = Variant("persistent", supports=BASELINE.supports, forward=forward, backward=backward,
                  options=("exp2", "low_precision_states", "low_precision_CB", "fuse_bmm", "stationary", "segments", "gluon",
                           "save_states"), saves_states=True)
