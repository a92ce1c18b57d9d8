"""Rows of measurements, one JSON object a line, in results/<gpu>/<bench>.jsonl: every published number's origin."""

import errno
import json
import logging
import os
import subprocess
from collections.abc import Callable, Hashable, Iterable
from configparser import ConfigParser
from dataclasses import asdict
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

RESULTS = Path(__file__).parent / "results"

ENVIRONMENT = ("git_sha", "dirty", "gpu", "driver", "torch", "triton", "sm_mhz", "time")
SIZES = ("batch", "seqlen", "nheads", "headdim", "dstate", "ngroups")
IDENTITY = ("bench", "variant", "options", "mode", "shape", *SIZES, "dtype", "chunk_size")
_SLOW = 0.8  # of the highest clock; an H100 at work that is not held back has all of it
_KEYS = ConfigParser()
_KEYS.read_string(Path(__file__).with_name("row_keys.ini").read_text())


def environment() -> dict:
    """The keys of ENVIRONMENT, as they are now. Without a GPU, gpu, driver and sm_mhz are None."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    driver, sm_mhz, _ = _nvidia_smi() if gpu else (None, None, None)
    sha, dirty = _git_state()
    return {
        "git_sha": sha, "dirty": dirty, "gpu": gpu, "driver": driver, "torch": torch.__version__,
        # without importing it: whether it interprets is decided at import
        "triton": next((found.version for found in distributions(name="triton")), None),
        "sm_mhz": sm_mhz, "time": datetime.now(timezone.utc).isoformat(timespec="seconds")}


def append(row: dict, out: Path = RESULTS) -> Path:
    """Appends a row to <out>/<gpu>/<bench>.jsonl in one write, so that rows of several processes never mix.

    Raises:
        ValueError: an unknown key, or one missing that every row has.
        OSError: the row could not be written; none of it is in the file then.
    """
    from ssd.runtime.tuning import device_slug

    allowed = {key for of in _KEYS.sections() if of == "every bench" or row.get("bench") in of.split() for key in _KEYS[of]}
    unknown, missing = sorted(row.keys() - allowed), sorted({"bench", *ENVIRONMENT} - row.keys())
    if unknown or missing:
        raise ValueError(f"row: unknown keys {unknown}, missing keys {missing}")
    path = out / device_slug(row["gpu"] or "cpu") / f"{row['bench']}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    line = (json.dumps(row, allow_nan=False) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        if (written := os.write(descriptor, line)) < len(line):  # the disk is full
            if (end := os.lseek(descriptor, 0, os.SEEK_CUR)) == os.fstat(descriptor).st_size:
                os.ftruncate(descriptor, end - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)
    return path


def add(rows: Iterable[dict], out: Path = RESULTS) -> list[dict]:
    """Appends rows, each with the environment as it is now, which gives all of them one time; returns the whole rows."""
    now, added = environment(), []
    for row in rows:
        added.append(row | now)
        append(added[-1], out)
    return added


def read(source: Path | list[dict] = RESULTS, **where) -> list[dict]:
    """Every row of a folder, or of a list, whose keys have the given values, oldest first.

    Raises:
        ValueError: a line that is no row; the message names the file and the line.
    """
    rows = source if isinstance(source, list) else _load(source)
    return [row for row in rows if all(row.get(key) == value for key, value in where.items())]


def get_us(row: dict) -> float:
    """The time in a CUDA graph, or launch by launch where there is none."""
    return row.get("graph_p50_us") or row["p50_us"]


def read_gpus(out: Path = RESULTS) -> list[dict]:
    """The rows of a folder that were measured on a GPU, and not at a slow clock as far as they say: what documents are written
    from. Raises as `read`.
    """
    return [row for row in _load(out) if row.get("gpu") and not is_slow(row)]


def is_slow(row: dict) -> bool:
    """Whether the row says that it was measured at a slow clock, see `find_slow_clock`."""
    return bool(row.get("slow_mhz"))


def find_slow_clock() -> dict:
    """Right behind a measurement: {"slow_mhz": clock} where the multiprocessors run at less than 80 % of what they can, too hot
    or short of power; {} otherwise, and without a GPU.
    """
    import torch

    _, now, most = _nvidia_smi() if torch.cuda.is_available() else (None, None, None)
    if not (now and most and now < _SLOW * most):
        return {}
    logging.getLogger("experiments").warning(
        "this GPU's clock fell to %s MHz, too hot or short of power; rows say so, and documents leave them out", now)
    return {"slow_mhz": now}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of a row")


def _load(out: Path) -> list[dict]:
    rows = []
    for path in sorted(out.glob("*/*.jsonl")):
        seen: set[bytes] = set()
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            if line in seen and b'"p50_us"' in line:  # a copy: no time is measured twice to the last digit
                continue
            seen.add(line)
            try:
                row = json.loads(line, parse_constant=_refuse_constant)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: not a JSON row: {error}") from None
            if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("bench", "time")):
                raise ValueError(f"{path}:{number}: got {line.decode()[:60]!r}, expected a JSON object with a bench and a time")
            rows.append(row)
    return sorted(rows, key=lambda row: row["time"])


def options(row: dict) -> dict | None:
    """The row's options; one that did not exist yet when it was measured has its default. None: a peer, which has none."""
    return None if row.get("options") is None else _default_options() | row["options"]


def has_default_options(row: dict) -> bool:
    """Whether the row is about a variant as it comes, or a peer."""
    return options(row) in (None, _default_options())


def describe_options(options: dict | None) -> str:
    """What differs from the default, `exp2=False, gluon=False`; empty if nothing does."""
    default = _default_options()
    return ", ".join(f"{name}={value}" for name, value in (options or {}).items() if value != default.get(name))


@cache
def _default_options() -> dict:
    from ssd import Options

    return asdict(Options())


def settings(row: dict, *but: str) -> tuple:
    """A run's settings but for these, to be told apart by. One that is None may be missing: rows older than it have none."""
    return tuple(sorted((name, str(value)) for name, value in row["run"].items() if name not in but and value is not None))


def read_run(source: Path | list[dict], run: dict, **where) -> list[dict]:
    """As `read`, of rows with these settings of a run."""
    return [row for row in read(source, **where) if settings(row) == settings({"run": run})]


def latest(rows: Iterable[dict], key: Callable[[dict], Hashable]) -> list[dict]:
    """The last of the rows that share a key, in the order in which the keys first came."""
    return list({key(row): row for row in rows}.values())


def group_by(rows: Iterable[dict], key: Callable[[dict], Hashable]) -> dict[Hashable, list[dict]]:
    """The rows that share each key, in the order in which the keys first came."""
    groups: dict[Hashable, list[dict]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def keep_last_runs(rows: Iterable[dict], key: Callable[[dict], Hashable]) -> dict[Hashable, list[dict]]:
    """Of the rows that share each key, those of the last time: what one run appended."""
    groups = group_by(rows, key)
    last = {shared: max(row["time"] for row in group) for shared, group in groups.items()}
    return {shared: [row for row in group if row["time"] == last[shared]] for shared, group in groups.items()}


def _nvidia_smi() -> tuple[str | None, int | None, int | None]:
    """Driver version, the multiprocessors' clock in MHz at this moment, and the highest that they have."""
    import torch

    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    command = ["nvidia-smi", "-i", uuid, "--query-gpu=driver_version,clocks.sm,clocks.max.sm",
               "--format=csv,noheader,nounits"]
    try:
        driver, *clocks = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().split(", ")
        now, most = (int(clock) if clock.isdigit() else None for clock in clocks)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None, None, None
    return driver, now, most


@cache
def _git_state() -> tuple[str | None, bool | None]:
    """Commit, and whether the tree differs, rows aside. GIT_SHA=<sha>[-dirty] says it for a copy without .git."""
    if given := os.environ.get("GIT_SHA"):
        return given.removesuffix("-dirty"), given.endswith("-dirty")

    def git(*args: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--", ":/", ":(top,exclude)experiments/results")
        return git("rev-parse", "HEAD"), bool(changes)
    except (OSError, subprocess.CalledProcessError):
        return None, None
