"""Text through Hugging Face's datasets, a document each row: local files of it, or a data set by name; and its tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np

from ..reasons import first_line

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_COLUMN = "text"
_ROWS = 1000  # that are tokenized at a time


def read(data: str, encode: Callable[[list[str]], list[list[int]]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of every row's text, (tokens,) int32, and where each row ends in them, (rows,).

    What was tokenized is kept in the cache of datasets, for the next time.

    Args:
        data: a file, or NAME[:CONFIG] of a data set whose split `train` has a column `text`.
        encode: texts to their tokens.
        name: of the tokenizer, by which the cache knows what it keeps.

    Raises:
        ImportError: datasets is missing.
        ValueError: what it says of the data, or that they have no text.
    """
    package = _package("datasets", "reads text that is no .txt file")
    try:
        if reader := READERS.get(Path(data).suffix):
            rows = package.load_dataset(reader, data_files=data, split="train")
        else:
            rows = package.load_dataset(*data.split(":", 1), split="train")
    except Exception as reason:  # of many kinds: a reader's, the file system's, the network's
        said = "datasets cannot read it" if Path(data).exists() else "it is no path, and datasets knows no such data set"
        raise ValueError(f"--data: got {data}, but {said} ({first_line(reason)})") from reason
    if _COLUMN not in rows.column_names:
        raise ValueError(f"--data: {data} has the columns {', '.join(rows.column_names)}, expected {_COLUMN!r} among them")
    key = package.fingerprint.Hasher.hash([rows._fingerprint, name])
    rows = rows.map(lambda batch: {"tokens": encode([text or "" for text in batch[_COLUMN]])}, batched=True, batch_size=_ROWS,
                    remove_columns=rows.column_names, new_fingerprint=key, desc="tokenizing")
    lists = [chunk for chunk in rows.data.column("tokens").chunks if len(chunk)]
    lengths = np.concatenate([np.diff(chunk.offsets) for chunk in lists] or [np.empty(0, np.int64)])
    if not lengths.sum():
        raise ValueError(f"--data: {data} has no text in its column {_COLUMN!r}")
    return np.concatenate([chunk.flatten().to_numpy() for chunk in lists]).astype(np.int32), lengths.cumsum()


def encoder(name: str) -> tuple[Callable[[list[str]], list[list[int]]], int]:
    """What turns texts into tokens, and how many tokens it knows.

    Args:
        name: "bytes", a tokenizer.json, a folder with one, or a model's name.

    Raises:
        ImportError: tokenizers is missing.
        ValueError: what it says of the tokenizer.
    """
    if name == "bytes":
        return lambda texts: [list(text.encode()) for text in texts], 256
    tokenizer_class = _package("tokenizers", "splits text into tokens").Tokenizer
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    try:
        tokenizer = tokenizer_class.from_file(str(path)) if path.is_file() else tokenizer_class.from_pretrained(name)
    except Exception as reason:  # of the bare kind
        raise ValueError(f"--tokenizer: {name} cannot be loaded ({first_line(reason)}); expected bytes, a tokenizer.json, a "
                         "folder with one, or a model's name") from reason
    return (lambda texts: [encoding.ids for encoding in tokenizer.encode_batch(texts)]), tokenizer.get_vocab_size()


def _package(name: str, purpose: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} is not installed, which {purpose}: pip install {name}", name=name) from error
