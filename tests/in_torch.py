"""For tests of models: a module that imports `in_torch` runs all of its own in torch's forms, on one thread."""

import pytest


@pytest.fixture(autouse=True)
def in_torch(monkeypatch, one_thread):
    """CPU tensors take the forms in torch, as they do outside the tests. These models are too small to share among threads."""
    monkeypatch.setattr("ssd.block.arguments.INTERPRETED", False)
