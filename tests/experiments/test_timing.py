"""What `interleave` says of calls, on a host and a GPU that are counted."""

import pytest
import torch

from experiments import timing

FLUSH, ENQUEUE = 70.0, 5.0  # microseconds of the GPU, and of the host


class Machine:
    """A host that enqueues work, and a GPU that takes it in order. Also the tensor that is flushed with."""

    def __init__(self):
        self.host = self.gpu = 0.0

    def work(self, host_us: float, gpu_us: float) -> None:
        """Enqueued by the end of its time on the host."""
        self.host += host_us
        self.gpu = max(self.gpu, self.host) + gpu_us

    def zero_(self) -> None:
        self.work(ENQUEUE, FLUSH)

    def clock(self) -> float:
        self.host += 0.5
        return self.host / 1e6

    def synchronize(self) -> None:
        self.host = max(self.host, self.gpu)


@pytest.fixture
def machine(monkeypatch):
    m = Machine()

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            self.at = max(m.gpu, m.host)

        def elapsed_time(self, end):
            return (end.at - self.at) / 1e3

    monkeypatch.setattr(timing, "perf_counter", m.clock)
    monkeypatch.setattr(timing, "_flush", lambda: (m, FLUSH))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", m.synchronize)
    return m


@pytest.mark.parametrize("host, gpu", [(300, 180), (300, 260), (300, 290), (100, 400), (20, 30), (5, 1000)])
def test_a_loop_of_the_call(host, gpu, machine):
    """The slower of the two, whatever is timed beside it: a flush hides no launches."""
    calls = {"this": lambda: machine.work(host, gpu), "long": lambda: machine.work(10, 5000)}
    low, middle, high = timing.interleave(calls, repeats=5, warmup=1)["this"]
    assert low == pytest.approx(high, abs=2) and middle == pytest.approx(max(host, gpu), abs=2)


@pytest.mark.parametrize("host, gpu", [(30, 14), (60, 5), (10, 400)])
def test_the_launch_of_a_graph_is_not_timed(host, gpu, machine):
    (_, us, _) = timing.interleave({"this": lambda: machine.work(host, gpu)}, 5, 1, ahead=True)["this"]
    assert us == pytest.approx(gpu, abs=2)


def test_a_wait_before_each_call_is_not_timed(machine):
    calls = {"this": lambda: machine.work(10, 400)}
    (_, alone, _), (_, aligned, _) = (timing.interleave(calls, 5, 1, *align)["this"]
                                      for align in ((), (lambda: machine.work(ENQUEUE, 900),)))
    assert aligned == pytest.approx(alone, abs=2)
