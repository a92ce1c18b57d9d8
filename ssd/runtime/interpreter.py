"""Two defects of Triton's interpreter, mended.

Before 3.7 it makes Python's int of an array of one element, which NumPy 2.4 refuses. And up to 3.9 it keeps what a comparison
of two numbers gives in their dtype, not as a boolean: a mask made of one and of a comparison of tensors, `inside & (end ==
seqlen)`, then holds int32 to NumPy, which the loads and stores of 3.9 refuse ("mask has unsupported dtype").
"""

from __future__ import annotations

from functools import wraps

from triton import language as tl
from triton.runtime import interpreter

_COMPARISONS = ("create_icmp", "create_fcmp")


def mend() -> None:
    """For the kernels that are interpreted from now on in this process."""
    builder, patch_tensor = interpreter.InterpreterBuilder, interpreter._patch_lang_tensor
    for name in [name for name in dir(builder) if name.startswith(_COMPARISONS)]:
        setattr(builder, name, _make_boolean(getattr(builder, name)))

    def patch_tensor_with_index(tensor, scope) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_with_index


def _make_boolean(compare):
    @wraps(compare)
    def compare_to_boolean(*operands):
        return interpreter.TensorHandle(compare(*operands).data.astype(bool), tl.int1)

    return compare_to_boolean
