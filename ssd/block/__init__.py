"""What surrounds the SSD operator in a Mamba block: the functions of other packages that it is built from, by their names."""

from .conv1d import causal_conv1d_fn
from .conv1d_update import causal_conv1d_update
from .gated_norm import RMSNormGated, rms_norm_gated
from .mamba_inner import mamba_inner_fn
from .selective_scan import selective_scan_fn
from .state_update import selective_state_update

__all__ = ["RMSNormGated", "causal_conv1d_fn", "causal_conv1d_update", "mamba_inner_fn", "rms_norm_gated", "selective_scan_fn",
           "selective_state_update"]
