"""UTF-8 files as bytes, a document each."""

from pathlib import Path

import numpy as np


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of a .txt file, or of all in a folder and its folders, (tokens,) uint8; and where each file ends in them, (files,).

    Raises:
        FileNotFoundError, ValueError: naming the file or folder, and what is wrong with it.
    """
    files = [path] if path.is_file() else sorted(path.rglob("*.txt"))
    if not files:
        raise FileNotFoundError(f"--data: got {path}, which has no .txt file in it, expected at least one")
    contents = [_read_content(file) for file in files]
    return np.concatenate(contents), np.cumsum([len(content) for content in contents])


def _read_content(file: Path) -> np.ndarray:
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
