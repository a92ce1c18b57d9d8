"""Which kernels a selective scan takes: the walk, in Gluon, or the scans over pairs. Imports neither."""

import torch
from torch import Tensor
from triton import knobs

from ...runtime.toolchain import explain_missing_gluon

TOKENS = 16  # of a walk's tile, and from one state that its forward keeps to the next
_LARGEST_STATE, _FEWEST_CHANNELS, _FEWEST_OF_GROUP = 16, 512, 12


def takes_walk(u: Tensor, B: Tensor) -> bool:
    """Whether the walk is faster than the scans over pairs: with states that fit a thread's registers, groups that fill most of
    a warp, and so many channels that there is a small warp of them for every SM of a large GPU: a walk of few takes as long as
    one of these. The interpreter knows no Gluon, nor may this Triton, and an AMD GPU no PTX.

    A function of sizes alone, whatever the NVIDIA GPU, since it decides which states a forward keeps.
    """
    (batch, dim, _), (ngroups, dstate) = u.shape, B.shape[1:3]
    return (not knobs.runtime.interpret and u.is_cuda and torch.version.hip is None and explain_missing_gluon() is None
            and dstate <= _LARGEST_STATE and batch * dim >= _FEWEST_CHANNELS and dim // ngroups >= _FEWEST_OF_GROUP)
