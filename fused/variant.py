"""Variant `fused`: the forward with merged stages, three launches; for now the baseline's backward."""

from ssd.backward import backward
from ssd.registry import Variant
from ssd.variant import VARIANT as BASELINE

from .forward import forward

VARIANT = Variant("fused", supports=BASELINE.supports, forward=forward, backward=backward,
                  options=("exp2", "low_precision_states", "fuse_states", "low_precision_CB", "causal_blocks", "fuse_bmm",
                           "two_level", "gluon", "save_states"), saves_states=True)
