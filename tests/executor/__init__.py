"""Gluon kernels without a GPU: their Python source, on CPU tensors, under schedules that chance draws.

`Executor` loads modules anew with a stand-in for Gluon's language (`language`). Kernels without roles are plain Python then;
the roles of `gl.warp_specialize` are threads of which one runs at a time (`schedule`). A seed gives a schedule.

Modelled, and a `Fault` where a kernel relies on more:

- mbarriers (`barriers`): counts, bytes, phases; a wait passes when the phase of that parity has completed.
- The TMA (`copies`): a copy in lands at any time, and a phase counts its bytes; rows out of bounds are 0. A copy out reads
  shared memory at any time until `store_wait`; rows out of bounds are not written.
- wgmma (`products`): in order, at any time until the wait that covers it; accumulators are not usable before. Operands are
  rounded to their dtype, sums are fp32.
- Shared memory (`memory`): NaN until written. Whoever touches it must come after those before: by a barrier of its warps, or
  by mbarriers on which the others arrived after they were done. This is checked by what each role can know (vector clocks)
  and not by what happened, so that most faults show in every schedule. Threads of a role need no barrier to find again what
  they themselves stored, in the same layout.
- Loads from shared memory (`values`) are on their way until what they brought is used: stored, or given to a product. The
  compiler may sink them so far, below an mbarrier.arrive too.
- The proxies: products and copies out see a store only after fence_async_shared and a barrier of the warps, in this order.
- Launches that begin early: that the one before lets them, that nothing came between, and that a role waits for its end
  before it reads what that one wrote, or writes what it touched.
- Prefetches into L2: that all of one lies in its tensor, in steps of 16 bytes.
- Deadlocks: who waits for what, and in which line.

Assumed: outside of roles the compiler's own barriers keep ordinary accesses in order. In them it adds some as well, which
nothing here relies on. Stricter than hardware may be: a wait for products counts for the warp that waits, as PTX has it, so
that their operands are free only after a barrier of the warps; CUTLASS gives them back without one.

Not modelled: layouts, but to tell whether a thread finds its own elements; so swizzles and conversions that Triton refuses go
unnoticed. Shared memory that is written before the roles begin, or has gaps. Registers, bank conflicts, anything
that takes time. Races in global memory, also between blocks, which run one after the other. Overflow of int32, the rounding of
approximate instructions, clusters, multicast. And machine code has faults of its own, for which `tools/late_loads.py` and
others look.
"""

from tests.executor.loading import Executor
from tests.executor.schedule import Fault

__all__ = ["Executor", "Fault"]
