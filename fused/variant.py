"""Variant `fused`: the forward with merged stages; the backward in group loops."""

from ssd.baseline.variant import VARIANT as BASELINE
from ssd.registry import Variant

from .backward import backward
from .forward import forward, states_every

VARIANT = Variant("fused", supports=BASELINE.supports, forward=forward, backward=backward,
                  options=("exp2", "low_precision_states", "fuse_states", "low_precision_CB", "causal_blocks", "fuse_bmm",
                           "two_level", "gluon", "save_states", "fuse_backward"), states_every=states_every)
