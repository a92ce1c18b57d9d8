"""In what order calls are timed."""

from collections import Counter
from itertools import pairwise

import pytest

from experiments.timing import orders


@pytest.mark.parametrize("n", range(1, 9))
def test_each_place_and_each_predecessor_equally_often(n):
    cycle = n if n % 2 == 0 else 2 * n
    rounds = orders(n, 3 * cycle)
    assert all(sorted(order) == [*range(n)] for order in rounds)
    places = Counter((place, call) for order in rounds for place, call in enumerate(order))
    assert set(places.values()) == {3 * cycle // n}
    behind = Counter(pair for order in rounds for pair in pairwise(order))
    assert n == 1 or (len(behind) == n * (n - 1) and set(behind.values()) == {3 * cycle // n})


def test_as_many_as_asked_for():
    assert [len(orders(6, rounds)) for rounds in (1, 6, 40)] == [1, 6, 40]
    assert orders(6, 40)[:6] != orders(6, 40)[6:12]  # not one and the same cycle again
