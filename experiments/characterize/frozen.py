"""The first model's predictions for an H100, and what was measured of them since.

frozen_h100.csv is what `projection.freeze` of 72d017f wrote: five terms at the data sheet's rates, fitted to the H200's rows.
The model and those rows are the ones of 0932c9c, the parent of the commit with the first row of an H100: the fit gives the same
coefficients to the last digit in both. The file itself was written after that row. The four sums for fused and persistent on
8b-b4 were in docs/characterisation/report.md before it, since 2b1038f.
"""

import csv
from pathlib import Path

from .projection import Outcome, Sample

COMMIT = "0932c9c"
_GPU = "h100"
_FILE = Path(__file__).with_name("frozen_h100.csv")


def read() -> dict[tuple, float]:
    """{(variant, mode, shape, chunk size): microseconds}; the chunk size is None where the kernels do not heed it."""
    with _FILE.open() as file:
        return {(line["variant"], line["mode"], line["shape"], int(line["chunk_size"]) if line["chunk_size"] else None):
                float(line["predicted_us"]) for line in csv.DictReader(file)}


def compare(samples: list[Sample]) -> list[Outcome]:
    """The calls among these that were predicted, with what was predicted."""
    frozen = read()
    found = []
    for one in samples:
        call = (one.variant, one.mode, one.shape)
        predicted = frozen.get((*call, one.chunk_size), frozen.get((*call, None)))
        if one.gpu == _GPU and predicted is not None:
            found.append(Outcome(one, predicted))
    return found
