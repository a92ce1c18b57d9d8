"""A Triton whose Gluon lacks what the kernels need: plain kernels run, and the reason is said."""

import ast
import sys

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from fused import hopper
from ssd.kernels.arguments import COUNTS
from ssd.registry import get_variant
from ssd.runtime import gluon_names, toolchain
from ssd.types import Options
from tests.inputs import Case, Shape, random_inputs
from tests.programs import ROOT

INPUTS = (Shape(1, 80, 2, headdim=64, dstate=64, chunk_size=64), Case(), torch.float16)


@pytest.fixture
def lacking(monkeypatch):
    """Takes names from Gluon, as if Triton had been installed without them."""
    def take(owner, *names):
        for name in names:
            monkeypatch.delattr(owner, name, raising=False)
        monkeypatch.delitem(sys.modules, "ssd.runtime.gluon_names", raising=False)
        toolchain.explain_missing_gluon.cache_clear()

    toolchain.explain_missing_gluon.cache_clear()
    yield take
    monkeypatch.undo()
    toolchain.explain_missing_gluon.cache_clear()


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)


def test_nothing_is_missing():
    assert toolchain.explain_missing_gluon() is None


@pytest.mark.parametrize("owner, names", [
    (gl, ("warp_specialize",)), (gl.shared_memory_descriptor, ("reinterpret", "_reinterpret")),
    (tma, ("async_load", "async_copy_global_to_shared")),
], ids=["language", "method", "renamed"])
def test_what_is_missing_is_named(owner, names, lacking, on_hopper):
    inputs = random_inputs(*INPUTS, "cpu")
    assert hopper.cannot_run(inputs, Options(), keeps=True) is None
    lacking(owner, *names)
    reason = hopper.cannot_run(inputs, Options(), keeps=True)
    assert triton.__version__ in reason and " or ".join(names) in reason


def test_without_gluon(lacking, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    lacking(gl)
    assert "lacks some of Gluon" in toolchain.explain_missing_gluon()


def test_an_untested_triton(lacking, monkeypatch):
    monkeypatch.setattr(toolchain, "TRITON", (3, 10))
    assert "tested with Triton 3.6 to 3.9" in toolchain.explain_missing_gluon()


@pytest.mark.parametrize("name", ["fused", "persistent"])
def test_plain_kernels_run(name, lacking, on_hopper, device, caplog):
    """In place of those for Hopper, which the inputs allow; as a warning, for no other inputs would help."""
    inputs = random_inputs(*INPUTS, device)
    plain = get_variant(name).forward(inputs, Options(gluon=False), False)
    lacking(gl, "warp_specialize")
    hopper._say_plain.cache_clear()
    with caplog.at_level("WARNING", "ssd"):
        results = get_variant(name).forward(inputs, Options(), False)
    (said,) = caplog.messages
    assert name in said and "plain Triton kernels" in said and "warp_specialize" in said
    for result, expected in zip(results[:2], plain[:2], strict=True):
        assert torch.equal(result, expected)


def test_names_that_kernels_use_are_checked():
    """Those that a kernel looks for when it is compiled."""
    checked = {"gluon": gluon_names._GLUON, "gl": gluon_names._LANGUAGE, "mbarrier": gluon_names._MBARRIER}
    used = {owner: set() for owner in checked}
    files = (path for package in ("ssd", "fused", "persistent") for path in (ROOT / package).rglob("*.py"))
    sources = [path.read_text() for path in files if path.name != "gluon_names.py"]
    sources = [source for source in sources if "gluon.jit" in source]
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in checked:
                used[node.value.id].add(node.attr)
    assert len(sources) >= 7
    for owner, names in used.items():
        assert names <= {*checked[owner]}, owner


@triton.jit
def _mask_kernel(x, n, N: tl.constexpr):
    i = tl.arange(0, N)
    last = tl.minimum(tl.program_id(0) + n, n) == n
    tl.store(x + i, tl.load(x + i, mask=(i < n) & last, other=7.0) + 1.0, mask=(i > 0) & last)


def test_masks_made_of_numbers(device):
    """Triton's interpreter has them as numbers, which that of 3.9 refuses."""
    x = torch.zeros(8, device=device)
    _mask_kernel[(1,)](x, 4, 8)
    assert x.tolist() == [0, 1, 1, 1, 8, 8, 8, 8]


def test_no_kernel_is_compiled_for_a_count_of_its_own():
    """Such as a single chunk, at which it would be another kernel than the tests have run."""
    kernels = {}
    for folder in ("ssd", "fused", "persistent"):
        for path in (ROOT / folder).rglob("kernels/*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                    names = {argument.arg for argument in node.args.args}
                    [jit] = map(ast.unparse, node.decorator_list)
                    if names & set(COUNTS) and jit.startswith("triton"):
                        kernels[node.name] = jit
    assert len(kernels) > 20 and set(kernels.values()) == {"triton.jit(do_not_specialize=COUNTS)"}
