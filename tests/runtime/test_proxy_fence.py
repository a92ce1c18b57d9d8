"""The fence that Triton 3.6 leaves out is there, whatever was compiled before."""

from contextlib import nullcontext

import pytest
import torch

from ssd.baseline.kernels.bmm_chunk import bmm_chunk
from ssd.runtime import launch
from ssd.types import Options
from tests.inputs import Case, Shape, random_inputs
from tests.programs import run_python
from tools import tritons

OLDEST = tritons.PINNED[0]


def main() -> None:
    """Prints how many fences the same kernel has without the hook and, compiled behind it, with it."""
    from tools.compile_kernels import collect_kernels, use_installed_tools

    use_installed_tools()
    inputs = random_inputs(Shape(1, 256, 2, dstate=128, chunk_size=256), Case(), torch.bfloat16)
    add_fences = launch.add_fences
    for context in (lambda: nullcontext(()), add_fences):
        launch.add_fences = context
        with collect_kernels(90) as found:
            bmm_chunk(inputs, Options())
        (kernel,) = found.values()
        ptx = kernel.asm["ptx"]
        print(ptx.count("fence.proxy.async"), ptx.count("wgmma.fence"))


def test_kernels_compiled_without_it_are_not_taken(tmp_path):
    """By a process that knew nothing of it, into the same folder of compiled kernels, or earlier in this process."""
    if reason := tritons.explain_missing(OLDEST):
        pytest.skip(reason)
    printed = run_python("-m", __name__, environment={**tritons.make_environment(OLDEST), "TRITON_CACHE_DIR": str(tmp_path)})
    (without, groups), (with_hook, _) = ([int(count) for count in line.split()] for line in printed.splitlines())
    assert with_hook == without + groups > 0


if __name__ == "__main__":
    main()
