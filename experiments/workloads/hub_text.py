"""Text through Hugging Face's datasets, a document each row: local files of it, or a data set by name; and its tokenizers."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..packages import import_package
from ..terminal import first_line

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_COLUMN = "text"
_ROWS = 1000  # that are tokenized at a time
_PATIENCE = 10  # seconds for the Hub to answer


@dataclass(frozen=True)
class Tokenizer:
    """Attributes:
        encode: texts to their tokens.
        vocab_size: a number that all tokens are below.
        key: what the tokens depend on, by which a cache knows what it keeps.
    """

    encode: Callable[[list[str]], list[list[int]]]
    vocab_size: int
    key: str


def read(data: str, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of every row's text, (tokens,) int32, and where each row ends in them, (rows,).

    What was tokenized is kept in the cache of datasets, for the next time.

    Args:
        data: a file, or NAME[:CONFIG] of a data set whose split `train` has a column `text`.
        tokenizer: of the texts.

    Raises:
        ImportError: datasets is missing.
        ValueError: what it says of the data, or that they have no text.
    """
    package = import_package("datasets", "reads text that is no .txt file", "pip install datasets")
    try:
        if reader := READERS.get(Path(data).suffix):
            rows = package.load_dataset(reader, data_files=data, split="train")
        else:
            name, *config = data.split(":", 1)
            _try_hub("dataset", name)
            rows = package.load_dataset(name, *config, split="train")
    except Exception as reason:  # of many kinds: a reader's, the file system's, the network's
        raise ValueError(f"--data: got {data}, {_explain(data, reason)}") from reason
    if _COLUMN not in rows.column_names:
        raise ValueError(f"--data: {data} has the columns {', '.join(rows.column_names)}, expected {_COLUMN!r} among them")
    if (kind := getattr(rows.features[_COLUMN], "dtype", "list")) not in ("string", "large_string", "null"):
        raise ValueError(f"--data: {data} has {kind} in its column {_COLUMN!r}, expected strings")
    key = package.fingerprint.Hasher.hash([rows._fingerprint, tokenizer.key])
    rows = rows.map(lambda batch: {"tokens": tokenizer.encode([text or "" for text in batch[_COLUMN]])}, batched=True,
                    batch_size=_ROWS, remove_columns=rows.column_names, new_fingerprint=key, desc="tokenizing")
    lists = [chunk for chunk in rows.data.column("tokens").chunks if len(chunk)]
    lengths = np.concatenate([np.diff(chunk.offsets) for chunk in lists] or [np.empty(0, np.int64)])
    if not lengths.sum():
        raise ValueError(f"--data: {data} has no text in its column {_COLUMN!r}")
    return np.concatenate([chunk.flatten().to_numpy() for chunk in lists]).astype(np.int32), lengths.cumsum()


def _try_hub(kind: str, name: str) -> None:
    """Turns huggingface_hub to what is cached where the Hub does not answer, which would be tried for half a minute."""
    import huggingface_hub as hub

    try:
        hub.HfApi().repo_info(name, repo_type=kind, timeout=_PATIENCE)
    except (hub.errors.HfHubHTTPError, ValueError):
        pass  # an answer, or no name to ask for: who loads it says which
    except Exception:  # of the client's own kinds, which differ by version
        hub.constants.HF_HUB_OFFLINE = True


def _explain(data: str, reason: Exception) -> str:
    """Why datasets could not read it: a line of the file, the first error behind the others, or the network."""
    if Path(data).suffix == ".jsonl":
        with suppress(OSError), Path(data).open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    if line.strip() and not isinstance(json.loads(line), dict):
                        return f"line {number} of which is no JSON object: {line[:60]!r}"
                except ValueError as error:
                    return f"line {number} of which is not JSON: {first_line(error)}"
    if Path(data).exists():
        while behind := reason.__cause__ or reason.__context__:
            reason = behind
        return f"which datasets cannot read: {first_line(reason)}"
    if isinstance(reason, ConnectionError) or "offline" in str(reason).lower():
        return (f"which is no path, and the Hugging Face Hub, which may have a data set of that name, cannot be reached "
                f"({first_line(reason)}); expected a file, or a data set that was downloaded before")
    return f"which is no path, and no data set that the Hugging Face Hub lets us read ({first_line(reason)})"


def load_tokenizer(name: str) -> Tokenizer:
    """Args:
        name: "bytes", a tokenizer.json, a folder with one, or a model's name.

    Raises:
        ImportError: tokenizers is missing.
        ValueError: what it says of the tokenizer.
    """
    if name == "bytes":
        return Tokenizer(lambda texts: [list(text.encode()) for text in texts], 256, name)
    tokenizer_class = import_package("tokenizers", "splits text into tokens", "pip install tokenizers").Tokenizer
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    try:
        if path.is_file():
            tokenizer = tokenizer_class.from_file(str(path))
        else:
            _try_hub("model", name)
            tokenizer = tokenizer_class.from_pretrained(name)
    except Exception as reason:  # of the bare kind
        raise ValueError(f"--tokenizer: {name} cannot be loaded ({first_line(reason)}); expected bytes, a tokenizer.json, a "
                         "folder with one, or a model's name") from reason
    tokenizer.no_truncation()  # of which a file may say something, for other uses
    tokenizer.no_padding()

    def encode(texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]

    return Tokenizer(encode, max(tokenizer.get_vocab().values()) + 1, tokenizer.to_str())
