"""Text that is made up, for training without a data set: as skewed as words are, and predictable in three ways.

Half of the tokens are Zipf's; the other half follow from the token before and the document's topic by a sparse table; and
documents repeat spans of their own. So a model first learns frequencies, then the table, then to copy.
"""

import numpy as np

_EXPONENT = 1.1  # of Zipf's law
_TOPICS, _SUCCESSORS = 16, 4
_MEDIAN_LENGTH, _LENGTH_DEVIATION, _SHORTEST = 600, 0.8, 8
_SPANS = range(16, 65)
_TOKENS_PER_SPAN = 160  # about a quarter of all tokens is copied


class SyntheticText:
    """Documents in rows; the language is one, the seed chooses what is said.

    Token n is the n-th most frequent. Lengths of documents are lognormal with a median of 600 tokens, or of half a row where
    that is shorter. A row starts with a document's first token, and cuts the last document off.

    Args:
        vocab_size: tokens.
        length: tokens of a row.
        seed: of the rows.
    """

    def __init__(self, vocab_size: int, length: int, seed: int):
        self.length, self.seed = length, seed
        self.zipf = np.arange(1, vocab_size + 1) ** -_EXPONENT
        self.zipf /= self.zipf.sum()
        self._cumulative = self.zipf.cumsum()
        draws = np.random.default_rng(0).random((_TOPICS, vocab_size, _SUCCESSORS), dtype=np.float32)
        self.successors = self._words(draws)

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and their documents, each (length,) int64."""
        tokens, documents, _, _ = self._draw_row(number)
        return tokens, documents

    def floor(self, rows: int = 64) -> float:
        """A bound from below to the mean loss in nats, from that many rows: of a model that knows the language and each topic,
        and is told where what it copies begins and ends.
        """
        losses = []
        for number in range(rows):
            tokens, documents, topics, copied = self._draw_row(number)
            follows = (self.successors[topics[1:], tokens[:-1]] == tokens[1:, None]).mean(-1)
            loss = -np.log(self.zipf[tokens[1:]] / 2 + follows / 2)
            losses.append(np.where(copied[1:], 0, loss)[documents[1:] == documents[:-1]])
        return float(np.concatenate(losses).mean())

    def _draw_row(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Of a row's tokens: which they are, their documents, topics, and whether they were copied; each (length,)."""
        random = np.random.default_rng([self.seed, number])
        lengths = self._document_lengths(random)
        used = lengths[: int(lengths.cumsum().searchsorted(self.length)) + 1]  # all would take a hundred times the memory
        documents = np.repeat(np.arange(len(used)), used)[: self.length]
        topics = random.integers(_TOPICS, size=len(lengths))[documents]
        sources = self._copies(random, lengths)
        copied = sources != np.arange(self.length)

        is_free = random.random(self.length) < 0.5
        is_free[1:] |= (documents[1:] != documents[:-1]) | (copied[:-1] & ~copied[1:])
        is_free[0] = True
        tokens = self._words(random.random(self.length))
        choices = random.integers(_SUCCESSORS, size=self.length)
        since_free = np.arange(self.length) - np.maximum.accumulate(np.where(is_free, np.arange(self.length), 0))
        for distance in range(1, since_free.max() + 1):  # of all chains at once, the link at this distance from their start
            (at,) = np.nonzero(since_free == distance)
            tokens[at] = self.successors[topics[at], tokens[at - 1], choices[at]]
        for at in np.flatnonzero(copied):  # in order, for what is copied may be a copy
            tokens[at] = tokens[sources[at]]
        return tokens, documents, topics, copied

    def _document_lengths(self, random: np.random.Generator) -> np.ndarray:
        """Of as many documents as surely fill a row."""
        median = min(_MEDIAN_LENGTH, self.length / 2)
        count = -(-self.length // _SHORTEST)
        return np.maximum(random.lognormal(np.log(median), _LENGTH_DEVIATION, count), _SHORTEST).astype(np.int64)

    def _copies(self, random: np.random.Generator, lengths: np.ndarray) -> np.ndarray:
        """(length,), the earlier place of its document that each token repeats, or its own."""
        sources, begin = np.arange(self.length), 0
        for length in lengths:
            if begin >= self.length:
                return sources
            end = min(begin + length, self.length)
            for _ in range(random.poisson((end - begin) / _TOKENS_PER_SPAN)):
                span = int(random.integers(_SPANS.start, _SPANS.stop))
                if 2 * span > end - begin:
                    continue
                start = int(random.integers(begin + span, end - span + 1))
                source = int(random.integers(begin, start - span + 1))
                sources[start : start + span] = np.arange(source, source + span)
            begin = end
        return sources

    def _words(self, uniform: np.ndarray) -> np.ndarray:
        """Numbers from 0 to 1 as Zipf's tokens."""
        return self._cumulative.searchsorted(uniform, side="right").clip(max=len(self.zipf) - 1)
