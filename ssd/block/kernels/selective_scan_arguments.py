"""What a selective scan's kernels are given beside tensors, the walk's and those that scan over pairs."""

from typing import NamedTuple


class Strides(NamedTuple):
    """The strides of a kernel's tensors, as one argument; () for those that are absent.

    Those of u, delta, B, C, z and dout come in units of Form.unit, without that of tokens, which is 1.
    """

    u: tuple[int, ...]
    delta: tuple[int, ...]
    B: tuple[int, ...]
    C: tuple[int, ...]
    z: tuple[int, ...]
    A: tuple[int, ...]
    D: tuple[int, ...]
    delta_bias: tuple[int, ...]
    dout: tuple[int, ...] = ()
    dlast_state: tuple[int, ...] = ()


class Form(NamedTuple):
    """What a kernel is compiled for, as one constexpr argument.

    tl.full makes a tile of these sizes: before Triton 3.9, tl.zeros takes no field of a constexpr.
    """

    dim: int
    ngroups: int
    dstate: int
    unit: int  # elements
    softplus: bool
    chunk: int  # tokens, in a walk those of a tile
    channels: int  # of a program that walks
    columns: int  # what dstate is padded to
