"""Context parallelism: one sequence cut over the ranks of a torch.distributed group (docs/context-parallel.md).

Each rank holds a contiguous part of the tokens, in the order of the ranks, and calls the same functions on it. Importing this
package imports torch.distributed; `ssd_chunk_scan` and `causal_conv1d_fn` do so when they are given a `context_group`.
"""

from .conv1d import find_convolution_start
from .exchange import gather
from .scan import scan_part

__all__ = ["find_convolution_start", "gather", "scan_part"]
