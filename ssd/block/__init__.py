"""What surrounds the SSD operator in a Mamba block: the functions of other packages that it is built from, by their names."""

from .conv1d import causal_conv1d_fn
from .conv1d_update import causal_conv1d_update
from .gated_norm import RMSNormGated, rms_norm_gated
from .state_update import selective_state_update

__all__ = ["RMSNormGated", "causal_conv1d_fn", "causal_conv1d_update", "rms_norm_gated", "selective_state_update"]
