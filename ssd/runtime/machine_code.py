"""What a kernel's PTX and nvdisasm's text of it say: instructions, loops, and how many registers an instruction fills."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import triton
from triton.runtime.cache import get_cache_manager

_LINE = re.compile(r"^[ \t]*\.(L_x_\d+):|/\*[0-9a-f]{4,}\*/\s+(.*?);", re.MULTILINE)  # a label, or an instruction
_LEAVES = re.compile(r"\b(?:BRA|BRX|EXIT|RET)\b")
_BRANCH = re.compile(r"BRA.*\(\.(L_x_\d+)\)")
_WIDTH = {"128": 4, "64": 2, "4": 4, "2": 2}  # by the last part of the opcode: LDS.128, LDSM.16.M88.4
NO_RESULT = ("ST", "RED", "SYNCS", "UTMA", "BAR", "WARPGROUP", "BRA")  # opcodes that begin so write no register


def read(sass: str) -> tuple[list[str], set[tuple[int, int]]]:
    """The instructions in order, and the loops: first and last of each."""
    code, labels = _list_code(sass)
    branches = ((n, _BRANCH.search(text)) for n, text in enumerate(code))
    loops = {(labels[b[1]], n) for n, b in branches if b and labels.get(b[1], n) < n}
    return [re.sub(r"^@!?U?P\d+ +", "", text) for text in code], loops


def split_blocks(sass: str) -> tuple[list[str], dict[int, tuple[int, list[int]]]]:
    """The instructions in order, with their predicates, and the blocks between branches: where each starts, where it ends and
    which come next."""
    code, labels = _list_code(sass)
    code = [text.replace(".reuse", "") for text in code]
    starts = {0, *labels.values()} | {n + 1 for n, text in enumerate(code) if _LEAVES.search(text)}
    starts = sorted(start for start in starts if start < len(code))
    blocks = {}
    for start, end in zip(starts, [*starts[1:], len(code)], strict=True):
        last = code[end - 1]
        always = _LEAVES.match(last) and not re.search(r"BRA\S* !?U?P\d", last)  # without a predicate, of either kind
        named = [labels[name] for name in re.findall(r"\.(L_x_\d+)", last) if labels.get(name, len(code)) < len(code)]
        blocks[start] = end, named + ([] if always or end == len(code) else [end])
    return code, blocks


@lru_cache(maxsize=1)  # for searches of one kernel, one after another; nothing changes what it returns
def _list_code(sass: str) -> tuple[list[str], dict[str, int]]:
    """The instructions in order, with their predicates, and which of them each label stands before."""
    code, labels = [], {}
    for label, instruction in _LINE.findall(sass):
        if label:
            labels[label] = len(code)
        else:
            code.append(instruction.strip())
    return code, labels


def inspect(tool: str, option: str, cubin: bytes) -> str:
    """What nvdisasm or cuobjdump, by its path, prints of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def find_once(find: Callable[[bytes], Any], cubin: bytes, *searches: Callable) -> Any:
    """find(cubin), as JSON gives it back, kept beside what Triton keeps on disk: the tools that read machine code are slow.

    What was found by other code, that of `find` and of the `searches` that it calls, or with another Triton, does not count.
    """
    modules = tuple(sorted({__name__, *(search.__module__ for search in (find, *searches))}))
    kept = get_cache_manager(hashlib.sha256(_read_modules(modules) + find.__name__.encode() + cubin).hexdigest())
    if path := kept.get_file("found.json"):
        return json.loads(Path(path).read_text())
    found = find(cubin)
    kept.put(json.dumps(found), "found.json", binary=False)
    return found


@cache
def _read_modules(names: tuple[str, ...]) -> bytes:
    return b"".join(Path(sys.modules[name].__file__).read_bytes() for name in names) + triton.__version__.encode()


def list_ptx_loops(ptx: str) -> tuple[list[str], list[tuple[int, int]]]:
    """The lines of PTX, and the loops: first and last line of each."""
    lines = ptx.splitlines()
    labels = {label[1]: n for n, line in enumerate(lines) if (label := re.match(r"(\$L\w+):", line))}
    branches = ((n, re.search(r"bra\S*\s+(\$L\w+);", line)) for n, line in enumerate(lines))
    return lines, [(labels[b[1]], n) for n, b in branches if b and labels.get(b[1], n) < n]


def width(opcode: str) -> int:
    """Registers that a load of this opcode fills."""
    return _WIDTH.get(opcode.split(".")[-1], 1)


def lanes_apart(ptx: str) -> int:
    """Additions in which two lanes that exchange what they have come to different sums, see `ssd.kernels.device.product`."""
    exchanged = set(re.findall(r"shfl\.sync\.bfly\.b32\s+(%\w+)[,|]", ptx))
    return sum(addend in exchanged for addend in re.findall(r"fma\.rn(?:\.ftz)?\.f32\s+%\w+, %\w+, %\w+, (%\w+);", ptx))
