"""What surrounds the SSD operator in a Mamba block: the functions of other packages that it is built from, by their names."""

from .conv1d import causal_conv1d_fn
from .conv1d_update import causal_conv1d_update

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]
