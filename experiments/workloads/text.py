"""Rows of tokens for language models: documents packed one after another, from what --data names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from . import hub_text, text_files
from .epochs import Epochs
from .language_model import IGNORED, LanguageModel, LanguageSizes, count_labelled, list_scans, next_token_loss
from .registry import Preset, Workload
from .synthetic_text import SyntheticText

if TYPE_CHECKING:
    from ..training_run import Run

_EXPECTED = f"synthetic, a .txt file or a folder of such, a file of {', '.join(hub_text.READERS)}, or the name of a data set"


class Rows(Dataset):
    """Row n as input_ids and labels, each (seqlen,) int64, and seq_idx, (seqlen,) int32, which counts the row's documents.

    A label is the token after, or -100 at the end of a document.

    Args:
        source: its `row(n)` gives tokens and documents, each (seqlen + 1,), documents rising.
        floor: as `registry.Workload.dataset` has it, and the attribute `samples`.
        documents: else a row is taken for one: it has no seq_idx, and no label is -100.
    """

    def __init__(self, source: SyntheticText | Windows, floor: float | None = None, documents: bool = True):
        self.source, self.floor, self.documents = source, floor, documents
        self.samples = getattr(source, "rows", None)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        tokens, documents = self.source.row(number)
        if not self.documents:
            return {"input_ids": torch.from_numpy(tokens[:-1].copy()), "labels": torch.from_numpy(tokens[1:].copy())}
        labels = np.where(documents[1:] == documents[:-1], tokens[1:], IGNORED)
        return {"input_ids": torch.from_numpy(tokens[:-1].copy()), "labels": torch.from_numpy(labels),
                "seq_idx": torch.from_numpy((documents[:-1] - documents[0]).astype(np.int32))}


class Windows:
    """Rows that are windows on one long text, in an order drawn anew for each epoch.

    Args:
        tokens: (tokens,).
        ends: where each document ends in them, (documents,).
        length: tokens of a row, of which one is the first of the next.
        seed: of the order.
    """

    def __init__(self, tokens: np.ndarray, ends: np.ndarray, length: int, seed: int):
        self.tokens, self.ends, self.length = tokens, ends, length
        self.rows = (len(tokens) - 1) // (length - 1)
        self._epochs = Epochs(self.rows, seed)

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and their documents, each (length,) int64."""
        first = self._epochs.place(number) * (self.length - 1)
        places = np.arange(first, first + self.length)
        return self.tokens[places].astype(np.int64), self.ends.searchsorted(places, side="right")


def load_rows(data: str, sizes: LanguageSizes, seqlen: int, seed: int, tokenizer: str = "bytes",
              documents: bool = True) -> Rows:
    """What --data names: "synthetic"; a .txt file or a folder of such, a document each; or what `hub_text.read` takes.

    Raises:
        FileNotFoundError, ValueError, ImportError: naming what came and what is accepted.
    """
    if data == "synthetic":
        if tokenizer != "bytes":
            raise ValueError(f"--tokenizer: got {tokenizer!r} with --data synthetic, expected none: it is made of tokens")
        source = SyntheticText(sizes.vocab_size, seqlen + 1, seed)
        return Rows(source, source.floor(), documents)
    loaded = hub_text.load_tokenizer(tokenizer)
    if sizes.vocab_size < loaded.vocab_size:
        raise ValueError(f"--data: got {data!r} for {sizes.vocab_size} tokens, expected synthetic, or a larger preset: the "
                         f"tokenizer {tokenizer} has {loaded.vocab_size}")
    tokens, ends = _text(data, loaded)
    if len(tokens) <= seqlen:
        raise ValueError(f"--data: {data} has {len(tokens)} tokens, expected at least {seqlen + 1}, a row of --seqlen + 1")
    return Rows(Windows(tokens, ends, seqlen + 1, seed), documents=documents)


def make_workload(name: str, presets: dict[str, Preset]) -> Workload:
    """A workload of language models."""
    def load_data(run: Run) -> Rows:
        return load_rows(run.data, run.sizes, run.seqlen, run.seed, run.tokenizer, run.documents)

    return Workload(name, presets, LanguageModel, load_data, next_token_loss, count_labelled, list_scans)


def _text(data: str, tokenizer: hub_text.Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and where each document ends in them."""
    path = Path(data)
    if not path.exists():
        if path.suffix in (".txt", *hub_text.READERS) or len(path.parts) > 2 or data.startswith((".", "/", "~")):
            raise FileNotFoundError(f"--data: got {data!r}, where nothing is, expected {_EXPECTED}")
        return hub_text.read(data, tokenizer)
    if path.is_file() and path.suffix in hub_text.READERS:
        return hub_text.read(data, tokenizer)
    if path.is_file() and path.suffix != ".txt":
        raise ValueError(f"--data: got {data}, expected {_EXPECTED}")
    content, ends = text_files.read(path)
    if tokenizer.key == "bytes":
        return content, ends
    documents = [bytes(part).decode() for part in np.split(content, ends[:-1])]
    lists = [np.array(tokens, np.int32) for tokens in tokenizer.encode(documents)]
    return np.concatenate(lists), np.cumsum([len(tokens) for tokens in lists])
