"""Rows of tokens for language models: documents packed one after another, from what --data names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .language_model import IGNORED, LanguageSizes
from .synthetic_text import SyntheticText

_BYTES = 256


class Rows(Dataset):
    """Row n as input_ids and labels, each (seqlen,) int64, and seq_idx, (seqlen,) int32, which counts the row's documents.

    A label is the token after, or -100 at the end of a document.

    Args:
        source: its `row(n)` gives tokens and documents, each (seqlen + 1,), documents rising.
        floor: as `registry.Workload.dataset` has it.
    """

    def __init__(self, source: SyntheticText | LocalText, floor: float | None = None):
        self.source, self.floor = source, floor

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        tokens, documents = self.source.row(number)
        labels = np.where(documents[1:] == documents[:-1], tokens[1:], IGNORED)
        return {"input_ids": torch.from_numpy(tokens[:-1].copy()), "labels": torch.from_numpy(labels),
                "seq_idx": torch.from_numpy((documents[:-1] - documents[0]).astype(np.int32))}


class LocalText:
    """UTF-8 files as bytes, a document each; rows are windows on all of them, in an order drawn anew for each epoch.

    Args:
        path: a .txt file, or a folder with some in it or in its folders.
        length: tokens of a row.
        seed: of the order.

    Raises:
        FileNotFoundError, ValueError: naming the file or folder, and what is wrong with it.
    """

    def __init__(self, path: Path, length: int, seed: int):
        self.length, self.seed = length, seed
        self._epoch, self._order = -1, np.empty(0, np.int64)
        contents = [_content(file) for file in _files(path)]
        self.tokens = np.concatenate(contents)
        self.ends = np.cumsum([len(content) for content in contents])
        self.rows = (len(self.tokens) - 1) // (length - 1)  # one token of a row is the first of the next
        if not self.rows:
            raise ValueError(f"--data: {path} has {len(self.tokens)} bytes, expected at least {length}, a row of --seqlen + 1")

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and their documents, each (length,) int64."""
        epoch, place = divmod(number, self.rows)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.rows)
        first = int(self._order[place]) * (self.length - 1)
        places = np.arange(first, first + self.length)
        return self.tokens[places].astype(np.int64), self.ends.searchsorted(places, side="right")


def rows(data: str, sizes: LanguageSizes, seqlen: int, seed: int) -> Rows:
    """What --data names: "synthetic", or a path as in `LocalText`.

    Raises:
        FileNotFoundError, ValueError: naming what came and what is accepted.
    """
    if data == "synthetic":
        source = SyntheticText(sizes.vocab_size, seqlen + 1, seed)
        return Rows(source, source.floor())
    if sizes.vocab_size < _BYTES:
        raise ValueError(f"--data: got {data!r} for {sizes.vocab_size} tokens, expected synthetic: text has {_BYTES}")
    return Rows(LocalText(Path(data), seqlen + 1, seed))


def _files(path: Path) -> list[Path]:
    if path.is_file():
        if path.suffix != ".txt":
            raise ValueError(f"--data: got {path}, expected a file whose name ends in .txt, a folder of such, or synthetic")
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"--data: got {str(path)!r}, where nothing is, expected synthetic, a .txt file or a folder of "
                                ".txt files; a data set known by name has to be written to such files first")
    files = sorted(path.rglob("*.txt"))
    if not files:
        raise FileNotFoundError(f"--data: got {path}, which has no .txt file in it, expected at least one")
    return files


def _content(file: Path) -> np.ndarray:
    """(bytes,) uint8."""
    content = file.read_bytes()
    if not content:
        raise ValueError(f"--data: {file} is empty, expected text; remove the file or fill it")
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"--data: {file} is not UTF-8 text, byte {error.start} is {content[error.start]:#04x}; convert it or "
                         "remove it") from None
    return np.frombuffer(content, np.uint8)
