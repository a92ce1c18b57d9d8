import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Four ranks, for all tests."""
    started = Ranks(4, tmp_path_factory.mktemp("ranks") / "store")
    yield started
    started.end()
