"""What the executor takes for right and for wrong, in kernels of a few lines."""

import re
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from triton.experimental.gluon import language as real
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ssd.kernels.chunk_cumsum import chunk_cumsum
from tests.executor import Executor, Fault
from tests.executor.copies import Descriptor
from tests.executor.language import NAMES, Jit, Pointer, prefetch, stand_ins
from tests.executor.schedule import Block, Touched
from tests.executor.values import Int
from tests.inputs import Case, Shape, random_inputs

_MODULES = stand_ins()
gl, hopper = _MODULES[NAMES[1]], _MODULES[NAMES[3]]
mbarrier, tma, fence_async_shared = hopper.mbarrier, hopper.tma, hopper.fence_async_shared
SEEDS = range(12)
LINE = real.SwizzledSharedLayout(1, 1, 1, [0])
SQUARE = real.NVMMASharedLayout.get_default_for([64, 64], real.float16)
TILE = real.NVMMASharedLayout.get_default_for([1, 64, 64], real.float16)
WIDE, NARROW = (real.BlockedLayout([n], [32], [4], [0]) for n in (1, 2))
MMA = real.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])


def play(*roles, seed: int = 0) -> None:
    """Runs a kernel of these roles, each with the same shared memory: a vector, two tiles of fp16 and three mbarriers."""

    def kernel():
        vector = gl.allocate_shared_memory(gl.float32, [64], LINE)
        tiles = gl.allocate_shared_memory(gl.float16, [2, 1, 64, 64], TILE)
        bars = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
        for n in range(3):
            mbarrier.init(bars.index(n), count=1)
        fence_async_shared()
        gl.warp_specialize([(Jit(role), (vector, tiles, bars)) for role in roles], [4] * (len(roles) - 1))

    Block(0, 1, kernel, seed).run()


def describe(t: torch.Tensor) -> Descriptor:
    return Descriptor(TensorDescriptor(t, list(t.shape), list(t.stride()), [1, 64, 64], TILE))


def square(tiles, n: int):
    return tiles.index(n).reinterpret(gl.float16, [64, 64], SQUARE)


def let_next_begin():
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


def wait_for_last():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


def ones():
    return gl.zeros([64], gl.float32, WIDE) + 1.0


def assert_faulty(*roles, says: str) -> None:
    """In every schedule."""
    for seed in SEEDS:
        with pytest.raises(Fault) as found:
            play(*roles, seed=seed)
        assert re.search(says, str(found.value)), found.value


def assert_fine(*roles) -> None:
    for seed in SEEDS:
        play(*roles, seed=seed)


@pytest.mark.parametrize("rows", (64, 70))
def test_rows_out_of_bounds(rows):
    """Are zeros on the way in, and not written on the way out."""
    x, out = torch.randn(1, rows, 64).half(), torch.full((2, 128, 64), 7.0).half()
    source, sink = describe(x), describe(out[:, :rows])

    def fetch(vector, tiles, bars):
        for n in range(2):
            mbarrier.expect(bars.index(n), 64 * 64 * 2)
            tma.async_copy_global_to_shared(source, [0, n * 64, 0], bars.index(n), tiles.index(n))

    def put(vector, tiles, bars):
        for n in range(2):
            mbarrier.wait(bars.index(n), 0)
            tma.async_copy_shared_to_global(sink, [0, n * 64, 0], tiles.index(n))
            seen.append(tiles.index(n).load(None).take_tensor())
        tma.store_wait(0)

    for seed in SEEDS:
        out.fill_(7.0)
        seen = []
        play(fetch, put, seed=seed)
        assert torch.equal(out[0, :rows], x[0]) and out[0, rows:].eq(7).all() and out[1].eq(7).all()
        assert torch.equal(torch.cat(seen, 1)[0, :rows], x[0]) and not torch.cat(seen, 1)[0, rows:].any()


def wait(n: int, parity: int = 0):
    return lambda vector, tiles, bars: mbarrier.wait(bars.index(n), parity)


def arrive(n: int, count: int = 1):
    return lambda vector, tiles, bars: mbarrier.arrive(bars.index(n), count=count)


def load(layout):
    return lambda vector, tiles, bars: vector.load(layout)


def use(layout):
    def step(vector, tiles, bars):
        assert vector.load(layout).take_tensor().eq(1).all()
    return step


def store(vector, tiles, bars):
    vector.store(ones())


def meet(vector, tiles, bars):
    gl.barrier()


ROLES = {
    "one": (wait(0, 1),),
    "zero": (wait(0, 0),),
    "idle": (),
    "first": (wait(0), arrive(1)),
    "second": (wait(1), arrive(0)),
    "twice": (arrive(0, count=2),),
    "writer": (store, meet, arrive(0)),
    "unmet writer": (store, arrive(0)),
    "reader": (wait(0), use(NARROW)),
    "rash reader": (load(NARROW),),
    # the third phase has the same parity as the first, and the store comes between
    "late writer": (arrive(0), arrive(0), store, meet, arrive(0), arrive(1)),
    "late reader": (wait(1), load(WIDE)),
    "hasty reader": (wait(0), load(WIDE)),
    "own elements": (store, use(WIDE), store),
    "others' elements": (store, load(NARROW)),
    "over a load": (store, meet, load(NARROW), store),
    "after a load": (store, meet, load(NARROW), meet, store),
}
UNTOLD = "nothing has written|of whose end this role has not been told|no barrier"
PLAYS = [  # roles, and what is wrong with them
    (("one",), None),  # a fresh barrier has the other parity
    (("zero", "idle"), r"deadlock:\n  role 0 \(zero\) at test_model.py:\d+ `step.*`: waits for a phase of "
                       r"parity 0 of bars\[0\] \(phase 0 lacks 1 of 1 arrivals and 0 bytes\)$"),
    (("first", "second"), r"(?s)role 0 \(first\).*bars\[0\].*role 1 \(second\).*bars\[1\]"),
    (("twice",), r"2 arrivals at bars\[0\], whose phase 0 lacks 1"),
    (("writer", "reader"), None),
    (("unmet writer", "reader"), "load of vector.*no barrier of its warps"),
    (("writer", "rash reader"), UNTOLD),
    (("late writer", "late reader"), None),
    (("late writer", "hasty reader"), UNTOLD),
    (("own elements",), None),
    (("after a load",), None),
    (("others' elements",), "load of vector.*store of vector.*no barrier"),
    (("over a load",), "store of vector.*load of vector.*still be on its way"),
]


@pytest.mark.parametrize(("names", "says"), PLAYS, ids=str)
def test_barriers_and_vectors(names, says):
    def play_role(name: str):
        def role(vector, tiles, bars):
            for step in ROLES[name]:
                step(vector, tiles, bars)
        role.__name__ = name
        return role

    roles = map(play_role, names)
    if says is None:
        assert_fine(*roles)
    else:
        assert_faulty(*roles, says=says)


def test_a_load_is_on_its_way_until_it_is_used():
    source, kept = describe(torch.randn(1, 64, 64).half()), torch.empty(64, 64)

    def fetch(vector, tiles, bars):
        for n in range(2):
            mbarrier.wait(bars.index(1), n & 1 ^ 1)
            mbarrier.expect(bars.index(0), 64 * 64 * 2)
            tma.async_load(source, [0, 0, 0], bars.index(0), tiles.index(0))
        mbarrier.wait(bars.index(0), 1)

    def early(vector, tiles, bars):
        read(tiles, bars, before=lambda value: None, after=store)

    def late(vector, tiles, bars):
        read(tiles, bars, before=store, after=lambda value: None)

    def read(tiles, bars, before, after):
        mbarrier.wait(bars.index(0), 0)
        value = gl.exp2(square(tiles, 0).load(MMA).to(gl.float32) * 2.0)
        before(value)
        gl.barrier()
        mbarrier.arrive(bars.index(1), count=1)
        after(value)

    def store(value):
        at = gl.expand_dims(gl.arange(0, 64, None), 1) * 64 + gl.expand_dims(gl.arange(0, 64, None), 0)
        gl.store(Pointer(kept, Int(0)) + at, value)

    assert_fine(late, fetch)
    assert_faulty(early, fetch, says=r"copy in of tiles\[0\] by role 1.*load of tiles\[0\] by role 0 \(early\)")


def test_products_run_in_order_and_add_to_each_other():
    def multiply(tiles, fenced=True, meets=True):
        eye = gl.expand_dims(gl.arange(0, 64, None), 0) == gl.expand_dims(gl.arange(0, 64, None), 1)
        square(tiles, 0).store(eye.to(gl.float16))
        if fenced:
            fence_async_shared()
        if meets:
            gl.barrier()
        one = gl.where(eye, 1.0, 1.0)
        first = hopper.warpgroup_mma(one.to(gl.float16), square(tiles, 0), gl.zeros([64, 64], gl.float32, MMA), use_acc=False,
                                     is_async=True)
        second = hopper.warpgroup_mma(square(tiles, 0), square(tiles, 0).permute((1, 0)), first, is_async=True)
        third = hopper.warpgroup_mma(square(tiles, 0), square(tiles, 0), one, is_async=True)
        second = hopper.warpgroup_mma_wait(1, deps=(second,))
        assert torch.equal(second.take_tensor(), torch.ones(64, 64) + torch.eye(64))
        gl.barrier()
        return third

    def right(vector, tiles, bars):
        third = hopper.warpgroup_mma_wait(0, deps=(multiply(tiles),))
        assert torch.equal(third.take_tensor(), torch.ones(64, 64) + torch.eye(64))
        gl.barrier()
        square(tiles, 0).store(third.to(gl.float16))

    def eager(vector, tiles, bars):
        third = hopper.warpgroup_mma_wait(0, deps=(multiply(tiles),))
        square(tiles, 0).store(third.to(gl.float16))

    def unfenced(vector, tiles, bars):
        multiply(tiles, fenced=False)

    def apart(vector, tiles, bars):
        multiply(tiles, meets=False)

    def hasty(vector, tiles, bars):
        multiply(tiles) * 2.0

    def forgetful(vector, tiles, bars):
        multiply(tiles)

    def overwriting(vector, tiles, bars):
        third = multiply(tiles)
        square(tiles, 0).store(gl.zeros([64, 64], gl.float16, MMA))
        hopper.warpgroup_mma_wait(0, deps=(third,))

    assert_fine(right)
    assert_faulty(unfenced, says="product of tiles.*no fence_async_shared")
    assert_faulty(apart, says="product of tiles.*no barrier")
    assert_faulty(hasty, says="role 0 .hasty. at .*uses an accumulator before")
    assert_faulty(forgetful, says="ended without a wait for the product of tiles")
    assert_faulty(eager, says="store of tiles.*product of tiles.*no barrier of its warps")
    assert_faulty(overwriting, says="store of tiles.*product of tiles.*on its way")


@pytest.mark.parametrize("bytes, says", ((64 * 64, "complete with 1 copies|nothing|told"), (64 * 64 * 3, "deadlock")))
def test_bytes_that_are_not_copied(bytes, says):
    source = describe(torch.randn(1, 64, 64).half())

    def fetch(vector, tiles, bars):
        mbarrier.expect(bars.index(0), bytes * 2)
        for n in range(2):
            tma.async_load(source, [0, 0, 0], bars.index(0), tiles.index(n))

    def reader(vector, tiles, bars):
        mbarrier.wait(bars.index(0), 0)
        square(tiles, 1).load(MMA)

    assert_faulty(fetch, reader, says=says)


def test_places_that_are_not_there():
    def behind(vector, tiles, bars):
        tiles.index(2)

    def before(vector, tiles, bars):
        bars.index(-1)

    assert_faulty(behind, says=r"role 0 \(behind\) at .*tiles\[2\] of 2")
    assert_faulty(before, says=r"role 0 \(before\) at .*mbarrier -1 of 3")


def test_schedules_differ_by_seed_alone():
    def order(seed: int) -> str:
        steps = []

        def role(name: str):
            def act(vector, tiles, bars):
                for _ in range(3):
                    steps.append(name)
                    mbarrier.wait(bars.index(0), 1)
            return act

        play(role("a"), role("b"), seed=seed)
        return "".join(steps)

    orders = [order(seed) for seed in SEEDS]
    assert len(set(orders)) > 3 and orders == [order(seed) for seed in SEEDS]


def test_integers_round_as_in_Triton():
    assert Int(7) // 2 % 2 == 1 and type(1 << Int(2)) is Int and (Int(3) == 3).to(gl.int32) == 1
    with pytest.raises(AssertionError, match="towards zero"):
        Int(-7) // 2


def test_an_edit_must_fit():
    with pytest.raises(AssertionError, match="has 0 times: nonsense"):
        Executor("fused.kernels.hopper.scan", edits={"fused.kernels.hopper.scan": [("nonsense", "")]})


@pytest.mark.parametrize(("first", "nbytes"), ((-4, 16), (0, 96), (12, 32), (1, 16), (0, 24)))
def test_prefetch_outside_of_a_tensor(first, nbytes):
    """Or not in steps of 16 bytes, which the hardware wants."""
    middle = torch.zeros(3, 16)[1]
    prefetch(Pointer(middle, Int(middle.storage_offset())), 64)
    with pytest.raises(AssertionError, match="prefetch of"):
        prefetch(Pointer(middle, Int(middle.storage_offset() + first)), nbytes)


@pytest.mark.parametrize("touched", ("read", "written", None))
@pytest.mark.parametrize("waits", (True, False))
def test_what_the_launch_before_touched_is_written_after_its_end(touched, waits):
    t, beside = torch.zeros(64), Touched()
    if touched:
        getattr(beside, touched).add(t.untyped_storage().data_ptr())

    def role():
        if waits:
            wait_for_last()
        gl.store(Pointer(t, Int(0)) + gl.arange(0, 64, WIDE), ones())

    block = Block(0, 1, lambda: gl.warp_specialize([(Jit(role), ())], []), 0, beside)
    with pytest.raises(Fault, match="writes what the launch before may") if touched and not waits else nullcontext():
        block.run()
    assert t.all() == (waits or not touched)


@pytest.mark.parametrize("lets", (True, False))
@pytest.mark.parametrize("between", (None, torch.clone, torch.Tensor.zero_, torch.numel, torch.t, torch.empty_like))
def test_launches_begin_beside_the_one_before(between, lets):
    executor, t = Executor(), torch.zeros(2, 2)
    may = lets and between not in (torch.clone, torch.Tensor.zero_)
    with executor.install():
        executor._launch(Jit(let_next_begin if lets else lambda: None), 2)
        if between:
            between(t)
        with nullcontext() if may else pytest.raises(Fault, match="begins early, which what came before it does not let it"):
            executor._launch(Jit(wait_for_last), 2, launch_pdl=True)


def test_one_that_begins_early_ends_after_the_one_before():
    executor = Executor()
    with executor.install(), pytest.raises(Fault, match="may end before the launch before"):
        executor._launch(Jit(let_next_begin), 2)
        executor._launch(Jit(lambda: None), 2, launch_pdl=True)


@pytest.mark.parametrize("waits", (True, False))
def test_the_next_may_count_on_the_end_of_all_before(waits):
    def kernel():
        if waits:
            wait_for_last()
        let_next_begin()

    executor = Executor()
    with executor.install(), nullcontext() if waits else pytest.raises(Fault, match="lets the next launch begin, but"):
        executor._launch(Jit(let_next_begin), 2)
        executor._launch(Jit(kernel), 2, launch_pdl=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter launches chunk_cumsum")
@pytest.mark.parametrize(("lets", "waits", "copies"), product((True, False), repeat=3))
def test_launches_begin_beside_one_in_plain_triton(lets, waits, copies):
    def kernel(t):  # copies: t was copied behind that one
        if waits:
            wait_for_last()
        gl.load(t + gl.arange(0, 16, WIDE))

    says = "what the launch before may still be at" if lets else "which what came before it does not let it"
    i, executor = random_inputs(Shape(1, 64, 1, 16, 1, 16, 64), Case(), torch.float32), Executor()
    with executor.install(), nullcontext() if lets and waits else pytest.raises(Fault, match=says):
        _, dA_cumsum = chunk_cumsum(i, lets_next=lets)
        executor._launch(Jit(kernel), 1, i.x.clone() if copies else dA_cumsum, launch_pdl=True)
