"""Names of Gluon, Triton's language for layouts and barriers, that differ between its versions: one for each here.

Raises ImportError, which names what is missing, where Triton's Gluon lacks one (`toolchain.gluon_missing` asks).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

block_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # of one partition's warps; renamed in Triton 3.7
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # renamed in 3.8, the old name gone in 3.9
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
store_wait = tma.store_wait
_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # since 3.9


@gluon.jit
def reinterpret(buffer, shape, LAYOUT: gl.constexpr):
    """Shared memory as another shape and layout of the same elements."""
    if _PUBLIC:
        other = buffer.reinterpret(buffer.dtype, shape, LAYOUT)
    else:
        other = buffer._reinterpret(buffer.dtype, shape, LAYOUT)
    return other
