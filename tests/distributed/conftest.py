import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Four ranks, for all tests."""
    started = Ranks(4, tmp_path_factory.mktemp("ranks") / "store")
    yield started
    started.end()


@pytest.fixture(scope="session")
def gpus(tmp_path_factory):
    """Two ranks with a GPU each, in groups of the kind that torch makes unless told another."""
    started = Ranks(2, tmp_path_factory.mktemp("gpus") / "store", "cpu:gloo,cuda:nccl")
    yield started
    started.end()
