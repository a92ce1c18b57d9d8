"""Repeated launches: the same bits as the call itself gives, and no call repeated that did anything else."""

import ctypes
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ssd.runtime import launch as module
from ssd.runtime import replay, tables, tuning
from ssd.runtime.buffer_places import ALIGNMENT
from ssd.runtime.late import deliver_late
from ssd.runtime.launch import launch
from tests.runtime.without_gpu import record_without_gpu

N = 6


def memory(arg) -> np.ndarray:
    """N floats at an argument: a tensor, a descriptor of one, or an address."""
    arg = getattr(arg, "base", arg) if not isinstance(arg, torch.Tensor) else arg
    address = arg if isinstance(arg, int) else arg.data_ptr()
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), (N,))


class Compiled:
    """A kernel: target = source * factor."""

    function = packed_metadata = None

    def __init__(self, early: bool = False):
        self.metadata = SimpleNamespace(launch_pdl=early)

    def run(self, x, y, z, stream, function, packed_metadata, metadata, enter, leave, source, target, factor):
        memory(target)[:] = memory(source) * factor


class Kernel:
    arg_names = ("source", "target", "factor")

    def __init__(self, early: bool = False):
        self.compiled = Compiled(early)

    def __getitem__(self, grid):
        def run(source, target, factor, **options):
            self.compiled.run(*grid, 1, 1, None, None, None, None, None, None, source, target, factor)
            return self.compiled

        return run


KERNEL, EARLY = Kernel(), Kernel(early=True)
TABLE = torch.full((N,), 10.0)
STREAM = {"current": 7}


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch):
    record_without_gpu(monkeypatch, Compiled, lambda device=None: STREAM["current"])


class Call:
    """Calls that are counted."""

    def __init__(self, body):
        self.body, self.count = body, 0

    def __call__(self, *args):
        self.count += 1
        return self.body(*args)

    def check(self, expected, times: int, *given) -> None:
        """Five calls on tensors of their own give what is expected; so many of them are made."""
        for k in range(5):
            tensors = tuple(None if t is None else t + k for t in given)
            got = replay.replay(self, tensors, (3.0,))
            for g, e in zip(got, expected(*tensors), strict=True):
                assert (g is None and e is None) or torch.equal(g, e), k
        assert self.count == times


def tensor(n=N):
    return torch.arange(n, dtype=torch.float32)


def scale(x, factor):
    target = torch.empty(N)
    launch(KERNEL, 1, x, target, factor=factor)
    return target


def test_results_and_what_is_between():
    def body(x, y, factor):
        parts = torch.empty(2, N)
        launch(KERNEL, 1, scale(x, factor), parts[0], factor=1.0)
        launch(KERNEL, 1, scale(y, 2.0), parts[1], factor=1.0)
        return parts[1], None, scale(x, factor), parts[0], torch.empty(0)

    Call(body).check(lambda x, y: (2 * y, None, 3 * x, 3 * x, torch.empty(0)), 2, tensor(), tensor() + 50)


@pytest.mark.parametrize(("kernels", "buffers"), [((KERNEL, KERNEL), 1), ((EARLY, KERNEL), 2), ((EARLY, EARLY), 2),
                                                  ((KERNEL, EARLY), 1)])
def test_what_an_early_launch_uses_lies_apart_from_what_the_one_before_does(kernels, buffers):
    """y = 3 x by one buffer, z = 3 x by another, which may have the same memory unless their launches run side by side."""
    def body(x, factor):
        y, z = torch.empty(2, N)
        launch(KERNEL, 1, scale(x, factor), y, factor=1.0)
        other = torch.empty(N)
        launch(kernels[0], 1, x, other, factor=factor)
        launch(kernels[1], 1, other, z, factor=1.0)
        return y, z

    Call(body).check(lambda x: (3 * x, 3 * x), 2, tensor())
    (recording,) = replay._recordings.values()
    assert recording.nbytes == buffers * ALIGNMENT


@pytest.mark.parametrize(("shape", "strides"), [
    ((N,), (1,)), ((2, 3), (1, 2)), ((2, 1, 3), (3, 1, 1)), ((3, 1), (2, 7)), ((0, 3), (3, 1))],
    ids=("plain", "transposed", "channels last", "gaps", "empty"))
def test_a_result_of_any_layout_is_no_view(shape, strides):
    def body(x, factor):
        out = torch.empty_strided(shape, strides)
        launch(KERNEL, 1, x, x.new_empty(N) if not out.numel() else out, factor=factor)
        return (out,)

    call = Call(body)
    for _ in range(4):
        (out,) = replay.replay(call, (tensor(),), (3.0,))
        assert not out._is_view() and out.shape == shape and out.stride() == strides
        assert torch.equal(out, 3 * tensor().as_strided(shape, strides))
    assert call.count == 2


def test_one_tensor_twice_is_another_form():
    call = Call(lambda x, y, factor: (scale(y, factor),))
    x = tensor()
    for _ in range(4):
        assert torch.equal(replay.replay(call, (x, x), (3.0,))[0], 3 * x)
    for _ in range(4):
        y = tensor() + 9
        assert torch.equal(replay.replay(call, (x, y), (3.0,))[0], 3 * y)
    assert call.count == 4


@pytest.mark.parametrize(("other", "is_other"), [
    (tensor(8)[:N], False), (torch.zeros(2, N), True), (torch.zeros(2 * N)[::2], True),
    (torch.zeros(N, dtype=torch.float64), True), (tensor(N + 1)[1:], True),
], ids=("the same", "shape", "strides", "dtype", "alignment"))
def test_another_form_or_setting_is_another_recording(other, is_other):
    call = Call(lambda x, factor: (scale(x, factor),))
    for _ in range(4):
        replay.replay(call, (tensor(),), (3.0,))
    replay.replay(call, (other,), (3.0,))
    assert call.count == 2 + is_other
    replay.replay(call, (tensor(),), (4.0,))
    assert call.count == 3 + is_other


def test_tables_are_held_by_their_recording():
    """Also when those who made them have let go."""
    table = torch.full((N,), 10.0)
    ref = weakref.ref(table)
    made = [table]
    call = Call(lambda x, factor: (scale(made[0], factor),))
    for _ in range(2):
        replay.replay(call, (tensor(),), (3.0,))
    del table, made[0]
    assert ref() is not None and torch.equal(replay.replay(call, (tensor(),), (3.0,))[0], torch.full((N,), 30.0))
    replay.clear()
    assert ref() is None


def test_tables_that_a_graph_reads_are_held_for_good(monkeypatch):
    monkeypatch.setattr(tables, "_held", {})
    call = Call(lambda x, factor: (scale(TABLE, factor),))
    for _ in range(3):
        replay.replay(call, (tensor(),), (3.0,))
    assert not tables._held
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    replay.replay(call, (tensor(),), (3.0,))
    replay.clear()
    assert call.count == 2 and [t is TABLE for t in tables._held.values()] == [True]


def test_tables_of_all_recordings_are_bounded(monkeypatch):
    """Those of the newest recording stay, whatever their size; a table that recordings share counts once."""
    monkeypatch.setattr(replay, "_MOST_TABLE_BYTES", 3 * TABLE.nbytes)
    refs = []

    def call(x, own, number):
        with ThreadPoolExecutor(1) as elsewhere:  # as `tables` makes them, which no recording sees
            table = elsewhere.submit(torch.full, (N,), number).result() if own else TABLE
        refs.append(weakref.ref(table))
        return (scale(table, number),)

    for own, least, most in ((False, 8, 8), (True, 1, 3)):
        replay.clear()
        refs.clear()
        for number in range(8):
            for _ in range(2):
                replay.replay(call, (tensor(),), (own, float(number)))
        assert sum(ref() is not None for ref in refs[1::2]) in range(least, most + 1) and own == (len(replay._recordings) < 8)


def test_a_recording_belongs_to_a_stream(monkeypatch):
    """The tables that it reads were allocated there."""
    call = Call(lambda x, factor: (scale(x, factor),))
    for stream, count in ((7, 2), (8, 4), (7, 4)):
        monkeypatch.setitem(STREAM, "current", stream)
        for _ in range(3):
            replay.replay(call, (tensor(),), (3.0,))
        assert call.count == count


def test_descriptors():
    def body(x, factor):
        target = torch.empty_like(x)
        launch(KERNEL, 1, SimpleNamespace(base=x, block_shape=[N], shape=[N]), SimpleNamespace(base=target, block_shape=[N]),
               factor=factor)
        return (target,)

    Call(body).check(lambda x: (3 * x,), 2, tensor())


def test_a_part_of_an_argument():
    Call(lambda x, factor: (scale(x[4 : 4 + N], factor),)).check(lambda x: (3 * x[4 : 4 + N],), 2, tensor(4 + N))


@pytest.mark.parametrize("body", [
    lambda x, factor: (scale(x + 1, factor),),
    lambda x, factor: (scale(x, factor).add_(factor),),
    lambda x, factor: (scale(x, factor), x),
    lambda x, factor: (scale(torch.zeros(N), factor),),
], ids=("arithmetic", "in place", "an argument comes back", "memory that is filled"))
def test_what_cannot_be_repeated_is_called(body):
    Call(body).check(lambda x: tuple(t.clone() for t in body(x, 3.0)), 5, tensor(12))


def test_a_part_that_begins_where_another_argument_does():
    """Of one projection; in the next call they are apart."""
    call = Call(lambda x, y, factor: (scale(x[8:14], factor), scale(y, factor)))
    for whole in (tensor(20), tensor(20), None, None):
        x = tensor(20) + 30 if whole is None else whole
        y = tensor() if whole is None else whole[8:14]
        got = replay.replay(call, (x, y), (3.0,))
        assert torch.equal(got[0], 3 * x[8:14]) and torch.equal(got[1], 3 * y)
    assert call.count == 4


def test_slices_of_one_projection():
    call = Call(lambda x, y, factor: (scale(x, factor), scale(y, factor)))
    for k in range(5):
        whole = tensor(20) + k
        x, y = whole[:N], whole[8 : 8 + N]
        assert all(torch.equal(g, 3 * t) for g, t in zip(replay.replay(call, (x, y), (3.0,)), (x, y), strict=True))
    assert call.count == 2


def test_a_call_that_waits_is_another_recording():
    """What it launches may not begin as early, and waits for what is brought."""
    call, x = Call(lambda x, factor: (scale(x, factor),)), tensor()
    for count in (1, 2, 2):
        assert torch.equal(replay.replay(call, (x,), (3.0,))[0], 3 * x) and call.count == count
    for count in (3, 4, 4):
        late = torch.full_like(x, torch.nan)
        with deliver_late(late, lambda: late.copy_(x)):  # noqa: B023  called before the next turn
            assert torch.equal(replay.replay(call, (late,), (3.0,))[0], 3 * x) and call.count == count


def test_forced_configs_are_not_recorded(monkeypatch):
    monkeypatch.setitem(tuning._forced, "kernel", None)
    Call(lambda x, factor: (scale(x, factor),)).check(lambda x: (3 * x,), 5, tensor())


@pytest.mark.parametrize("around", [False, True])
def test_what_cannot_be_recorded_is_not_held(around, monkeypatch):
    """Neither what is allocated nor what is launched, in a call too large, or around two that are."""
    monkeypatch.setattr(replay, "_MOST_BYTES", 1)
    alive = []

    def chain(x, factor):
        refs = []
        for _ in range(6):
            x = scale(x, factor)
            refs.append(weakref.ref(x))
        alive.append(sum(ref() is not None for ref in refs))
        return (x,)

    def double(x, factor):
        for t in (x, x + 0):
            (y,) = replay.replay(chain, (t,), (factor,))
        return (scale(y, 1.0),)

    Call(double if around else chain).check(lambda x: (3.0**6 * x,), 5, tensor())
    assert set(alive) == {1}


def test_calls_inside_have_recordings_of_their_own():
    """The one around them is called each time, and holds nothing of theirs."""
    inner = Call(lambda x, factor: (scale(x, factor),))

    def body(x, factor):
        first, second = (replay.replay(inner, (t,), (factor,))[0] for t in (x, x + 0))
        return scale(first, 2.0), second

    Call(body).check(lambda x: (6 * x, 3 * x), 5, tensor())
    assert inner.count == 2


@pytest.mark.parametrize("known", (False, True))
def test_a_call_inside_is_enough(known):
    """Whether or not it has a recording already, which launches behind the recorder's back."""
    inner = Call(lambda x, factor: (scale(x, factor),))
    for _ in range(3 * known):
        replay.replay(inner, (tensor(),), (3.0,))
    Call(lambda x, factor: (scale(*replay.replay(inner, (x,), (factor,)), factor=2.0),)).check(lambda x: (6 * x,), 5, tensor())
    assert inner.count == 2


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(replay, "_MOST", 3)
    for k in range(8):
        replay.replay(lambda x, factor: (scale(x, factor),), (tensor(),), (float(k),))
    assert len(replay._recordings) <= 3


def test_an_error_leaves_nothing_behind():
    def body(x, factor):
        raise ValueError

    for _ in range(4):
        with pytest.raises(ValueError):
            replay.replay(body, (tensor(),), (3.0,))
    assert module._recorded.launches is None
