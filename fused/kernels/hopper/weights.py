"""A tile of x or dy times a weight for each of its tokens, rounded once, in Gluon, for Hopper.

To make x w in fp32 took a thread 96 instructions for 32 elements of bf16, 48 of them to unpack x. So a weight is two numbers of
bf16, a high and a low part: fma(x, high, x low) is x w with the error of one rounding, two elements to an instruction. An
infinity in x becomes NaN. In fp16 the low part would underflow, so that x w is made in fp32. `add_multiple` unpacks x for a sum
in fp32, by one instruction an element.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def pack_weights(w, dtype: gl.constexpr):
    """Weights w fp32 for tiles of dtype, as `weigh` alone reads them: of bf16 both parts in 32 bits, bf16(w) above and
    bf16(w - bf16(w)) below; else w itself.
    """
    if dtype == gl.bfloat16:
        w = gl.inline_asm_elementwise("""{
            .reg .b16 high, zero;
            .reg .f32 value;
            cvt.rn.bf16.f32 high, $1;
            mov.b16 zero, 0;
            mov.b32 value, {zero, high};
            sub.rn.f32 value, $1, value;
            cvt.rn.bf16x2.f32 $0, $1, value;
            }""", "=r,r", [w], gl.float32, True, 1)
    return w


@gluon.jit
def weigh(x, w):
    """x w in the dtype of x. w: of `pack_weights`, broadcast to the shape of x."""
    if x.dtype == gl.bfloat16:
        weighed = gl.inline_asm_elementwise("""{
            .reg .b32 high, low;
            prmt.b32 high, $2, $3, 0x7632;
            prmt.b32 low, $2, $3, 0x5410;
            mul.rn.bf16x2 low, $1, low;
            fma.rn.bf16x2 $0, $1, high, low;
            }""", "=r,r,r,r", [x, w], gl.bfloat16, True, 2)
    else:
        weighed = (x.to(gl.float32) * w).to(x.dtype)
    return weighed


@gluon.jit
def add_multiple(y, x, factor):
    """y + factor x, in fp32, of x in 16 bits."""
    if x.dtype == gl.bfloat16:
        y = gl.inline_asm_elementwise("""{
            .reg .f32 left, right;
            shl.b32 left, $4, 16;
            and.b32 right, $4, 0xFFFF0000;
            fma.rn.f32 $0, left, $5, $2;
            fma.rn.f32 $1, right, $6, $3;
            }""", "=r,=r,r,r,r,r,r", [y, x, factor], gl.float32, True, 2)
    else:
        y += factor * x.to(gl.float32)
    return y
