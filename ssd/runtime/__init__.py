"""How kernels are compiled and launched: what the rest of the package need not know of Triton."""

from .versions import check

check()
