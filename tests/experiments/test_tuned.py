"""What kernels were tuned to goes from one process to the next."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import triton

from experiments import tuned

CONFIGS = [triton.Config({"BLOCK": size}) for size in (16, 32, 64)]


@pytest.fixture
def kernel(monkeypatch):
    """One that tunes itself, in a module of its own and in another that imports it."""
    def tuned_kernel(n, BLOCK: triton.language.constexpr):
        pass

    tuner = triton.autotune(CONFIGS, key=["n"])(triton.jit(tuned_kernel))
    for name in ("its_module", "another_module"):
        module = ModuleType(name)
        module.tuned_kernel = tuner
        monkeypatch.setitem(sys.modules, name, module)
    return tuner


@pytest.fixture
def ran(monkeypatch):
    """What was run in place of this command line: `does` when it is."""
    fake = SimpleNamespace(commands=[], does=lambda: None, status=0)

    def run(command, **_):
        fake.commands.append(command[1:])
        fake.does()
        return SimpleNamespace(returncode=fake.status, stderr="out of memory")

    monkeypatch.setattr(tuned.subprocess, "run", run)
    return fake


def test_configs_of_one_process_are_those_of_the_next(kernel, ran):
    def first():
        tuned.take()
        kernel.cache |= {(4096, "torch.bfloat16"): CONFIGS[2], (1, None): CONFIGS[0]}
        tuned.keep()
        kernel.cache.clear()

    ran.does = first
    with tuned.before(["profiled", "a call"], 10):
        assert ran.commands == [["-m", "experiments", "profiled", "a call"]]
        for _ in range(2):  # ncu runs a command more than once
            tuned.take()
            assert kernel.cache == {(4096, "torch.bfloat16"): CONFIGS[2], (1, None): CONFIGS[0]}
            kernel.cache.clear()
            kernel.cache[8,] = CONFIGS[1]
            tuned.keep()
            kernel.cache.clear()
    tuned.take()
    tuned.keep()
    assert not kernel.cache and tuned.KEPT not in tuned.os.environ


def test_what_failed(ran):
    ran.status = 1
    with pytest.raises(ValueError, match="without ncu: exit status 1: out of memory"), tuned.before(["a call"], 10):
        pass

    def never():
        raise tuned.subprocess.TimeoutExpired("a call", 10)

    ran.does = never
    with pytest.raises(ValueError, match="without ncu: did not end in 10 s"), tuned.before(["a call"], 10):
        pass
    assert tuned.KEPT not in tuned.os.environ


def test_only_what_was_tuned_is_kept(kernel, ran, tmp_path, monkeypatch):
    monkeypatch.setenv(tuned.KEPT, str(tmp_path / "configs.json"))
    tuned.keep()
    assert json.loads((tmp_path / "configs.json").read_text()) == {}
