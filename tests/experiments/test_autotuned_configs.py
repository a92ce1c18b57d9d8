"""What kernels were tuned to goes from one process to the next."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import Autotuner

from experiments import autotuned_configs


def tuned_kernel(out, n, BLOCK: tl.constexpr):
    tl.store(out, BLOCK)


def tuner(fastest: int, seen: list[int] | None = None) -> Autotuner:
    """The kernel, of which that size is the fastest; which are tried is noted."""
    def bench(call: Callable[[], None], quantiles: object) -> list[float]:
        call()
        size = int(OUT)
        if seen is not None:
            seen.append(size)
        return [float(size != fastest)] * 3

    configs = [triton.Config({"BLOCK": size}) for size in (16, 32, 64)]
    return triton.autotune(configs, key=["n"], do_bench=bench)(triton.jit(tuned_kernel))


OUT = torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu")


def launch(kernel: Autotuner, n: int = 1) -> int:
    """The size that it runs with."""
    kernel[1,](OUT, n)
    return int(OUT)


@pytest.fixture
def ran(monkeypatch):
    """What was run in place of this command line: `does` when it is."""
    fake = SimpleNamespace(commands=[], does=lambda: None, status=0)

    def run(command, **_):
        fake.commands.append(command[1:])
        fake.does()
        return SimpleNamespace(returncode=fake.status, stderr="out of memory")

    monkeypatch.setattr(autotuned_configs, "subprocess", SimpleNamespace(run=run))  # Triton runs ptxas by the real one
    return fake


def test_configs_of_one_process_are_those_of_the_next(ran):
    def first():
        with autotuned_configs.hand_over_configs():
            assert launch(tuner(32)) == 32 and launch(tuner(64), n=2) == 64

    ran.does = first
    run, bench = Autotuner.run, Autotuner._bench
    with autotuned_configs.tune_first(["profiled", "a call"], 10):
        assert ran.commands == [["-m", "experiments", "profiled", "a call"]]
        for _ in range(2):  # ncu runs a command more than once
            with autotuned_configs.hand_over_configs():
                seen: list[int] = []
                kernel = tuner(16, seen)
                assert (launch(kernel), launch(kernel, n=2), seen) == (32, 64, [])
                with pytest.raises(RuntimeError, match="tuned_kernel was not tuned to this call before"):
                    launch(kernel, n=3)
    assert (Autotuner.run, Autotuner._bench) == (run, bench) and autotuned_configs._FILE not in autotuned_configs.os.environ
    with autotuned_configs.hand_over_configs():
        assert launch(tuner(16)) == 16


def test_configs_are_compiled_before_they_are_timed(monkeypatch):
    kernel, noted = tuner(32, seen := []), []
    run = kernel.fn.run

    def note(*args, warmup: bool, BLOCK: int, **more):
        noted.append(("compiled" if warmup else "run", BLOCK))
        return run(*args, warmup=warmup, BLOCK=BLOCK, **more)

    monkeypatch.setattr(kernel.fn, "run", note)
    with autotuned_configs.compile_together():
        assert launch(kernel) == launch(kernel) == 32, "once for both calls"
    assert seen == [16, 32, 64]
    assert noted == [(what, size) for what in ("compiled", "run") for size in seen] + [("run", 32)] * 2
    assert launch(kernel, n=2) == 32 and ("compiled", 16) not in noted[8:]
