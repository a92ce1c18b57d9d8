"""The order in which a data set's samples come, without end: each epoch has one of its own."""

import numpy as np


class Epochs:
    """Places of samples by number. An epoch's order depends on the seed and the epoch alone, whoever asked for what before.

    Args:
        count: samples of an epoch.
        seed: of the orders.
    """

    def __init__(self, count: int, seed: int):
        self.count, self.seed = count, seed
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def place(self, number: int) -> int:
        """Which of the samples is the one of that number."""
        epoch, at = divmod(number, self.count)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.count)
        return int(self._order[at])
