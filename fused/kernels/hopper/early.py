"""A launch that begins while the one before ends (`ssd.runtime.dependent_launch`), in Gluon.

What comes after chunk_cumsum, the state pass or what walks whole sequences, begins beside it: all roles but the producer wait
for its end before they do anything. What walks cut sequences begins beside the state pass, once that has waited for
chunk_cumsum: blocks whose runs begin a sequence wait for nothing that the pass writes. Until they wait, roles read what was
there before, and write what nobody else touches. A launch may not begin early if one of the states that it is given is late
(`ssd.runtime.late`): the values come between the two launches.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssd.runtime.late import includes_late


def may_begin_early(ends, follows: bool, *given) -> bool:
    """Whether a launch may: it comes after the state pass, which left ends, or `follows` chunk_cumsum, and none of the states
    that it is given is late.
    """
    return (ends is not None or follows) and not includes_late(given)


@gluon.jit
def let_next_begin():
    """The next launch may begin once every block has come here. Until then its blocks are not there."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_last():
    """What the launch before wrote may be read from here on by the warps that came here."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, is_pure=False, pack=1)
