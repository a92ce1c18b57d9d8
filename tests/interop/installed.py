"""What a test needs of other packages."""

from importlib.util import find_spec

import pytest


def require_mamba_ssm() -> None:
    """Skips a test where `import mamba_ssm` cannot succeed."""
    for package in ("mamba_ssm", "transformers"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed, which `import mamba_ssm` needs")
