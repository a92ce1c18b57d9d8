"""A kernel that starts two roles and does nothing else, the control of `sanitize`: what racecheck says of Triton's part."""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _role(out, AT: gl.constexpr):
    gl.store(out + AT, 1.0)


@gluon.jit
def roles_alone_kernel(out):
    gl.warp_specialize([(_role, (out, 0)), (_role, (out, 1))], [4], [24])


def roles_alone(out: Tensor) -> None:
    """Each of two roles writes 1 to its element of out (2,), fp32."""
    roles_alone_kernel[(1,)](out, num_warps=4)
