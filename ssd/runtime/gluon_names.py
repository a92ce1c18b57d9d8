"""Gluon, Triton's language of layouts and barriers: names that differ between its versions, one for each here."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# What the kernels take by the same name from every version.
_GLUON = ("constexpr_function", "jit")
_LANGUAGE = (
    "BlockedLayout", "DistributedLinearLayout", "DotOperandLayout", "NVMMADistributedLayout", "NVMMASharedLayout",
    "SliceLayout", "SwizzledSharedLayout", "abs", "allocate_shared_memory", "arange", "bfloat16", "constexpr",
    "convert_layout", "exp2", "expand_dims", "float16", "float32", "inline_asm_elementwise", "int16", "int32", "int64", "join",
    "load", "max", "minimum", "num_programs", "permute", "program_id", "reshape", "rsqrt", "shared_memory_descriptor", "split",
    "static_assert", "static_range", "store", "sum", "tensor", "warp_specialize", "where", "zeros")
_HOPPER = ("fence_async_shared", "mbarrier", "warpgroup_mma", "warpgroup_mma_wait")
_MBARRIER = ("MBarrierLayout", "arrive", "expect", "init", "wait")


def _find(owner, *names: str):
    """What the owner has by the first of the names that it has, or an ImportError."""
    for name in names:
        if hasattr(owner, name):
            return getattr(owner, name)
    raise ImportError(f"{owner.__name__} has no {' or '.join(names)}")


block_barrier = _find(gl, "barrier", "thread_barrier")  # of one partition's warps; the first since Triton 3.7
async_load = _find(tma, "async_load", "async_copy_global_to_shared")  # the first since 3.8, and alone since 3.9
async_store = _find(tma, "async_store", "async_copy_shared_to_global")
store_wait = _find(tma, "store_wait")
_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # since 3.9


@gluon.jit
def reinterpret(buffer, shape, LAYOUT: gl.constexpr, DTYPE: gl.constexpr = None):
    """Shared memory as another shape and layout, of the same elements unless DTYPE says of which."""
    dtype: gl.constexpr = buffer.dtype if DTYPE is None else DTYPE
    return buffer.reinterpret(dtype, shape, LAYOUT) if _PUBLIC else buffer._reinterpret(dtype, shape, LAYOUT)


def check() -> None:
    """Raises ImportError, which names it, where a name is missing that a kernel would look for only when it is compiled."""
    from triton.experimental.gluon.language.nvidia import hopper

    _find(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")
    for owner, names in ((gluon, _GLUON), (gl, _LANGUAGE), (hopper, _HOPPER), (hopper.mbarrier, _MBARRIER)):
        for name in names:
            _find(owner, name)
