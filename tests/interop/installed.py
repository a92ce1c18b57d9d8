"""What a test needs of other packages, and how they are put aside."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest


def require_mamba_ssm() -> None:
    """Skips a test where `import mamba_ssm` cannot succeed."""
    for package in ("mamba_ssm", "transformers"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed, which `import mamba_ssm` needs")


@contextmanager
def set_aside(belongs: Callable[[str], bool]) -> Iterator[None]:
    """Modules whose names belong are as if never imported; afterwards those that were are there again, and no others."""
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if belongs(name)}
    yield
    for name in filter(belongs, list(sys.modules)):
        del sys.modules[name]
    sys.modules.update(kept)
