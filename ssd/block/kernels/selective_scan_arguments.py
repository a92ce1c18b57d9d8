"""What a selective scan's kernels are given beside tensors, the walk's and those that scan over pairs."""

from collections import namedtuple

# () for what is absent. Those of u, delta, B, C, z and dout come in units of Form.unit, but for those of tokens, which are 1.
Strides = namedtuple("Strides", "u delta B C z A D delta_bias dout dlast_state", defaults=((), ()))

# What a kernel is compiled for, as one constexpr argument. unit: elements; chunk: tokens, a walk's tile is one; channels: of a
# program that walks; columns: what dstate is padded to.
Form = namedtuple("Form", "dim ngroups dstate unit softplus chunk channels columns")
