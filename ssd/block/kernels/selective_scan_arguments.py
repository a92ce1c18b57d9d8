"""What a selective scan's kernels are given beside tensors, the walk's and those that scan over pairs."""

from collections import namedtuple

# () for what is absent. Those of u, delta, B, C, z and dout come in units of Form.unit, without that of tokens, which is 1.
Strides = namedtuple("Strides", "u delta B C z A D delta_bias dout dlast_state", defaults=((), ()))

# What a kernel is compiled for, as one constexpr argument. unit: elements; chunk: tokens, in a walk those of a tile; channels:
# of a program that walks; columns: what dstate is padded to. tl.full makes a tile of
# these sizes: before Triton 3.9, tl.zeros takes no field of a constexpr.
Form = namedtuple("Form", "dim ngroups dstate unit softplus chunk channels columns")
