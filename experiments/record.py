"""Rows of measurements, one JSON object a line, in results/<gpu>/<bench>.jsonl: every published number's origin."""

import json
import os
import subprocess
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"

ENVIRONMENT = ("git_sha", "dirty", "gpu", "driver", "torch", "triton", "sm_mhz", "time")
SIZES = ("batch", "seqlen", "nheads", "headdim", "dstate", "ngroups")
IDENTITY = ("bench", "variant", "options", "mode", "shape", *SIZES, "dtype", "chunk_size")
_MEASURED = ("p20_us", "p50_us", "p80_us", "graph_p50_us", "launches", "peak_mib", "ideal_bytes", "effective_gbps",
             "copy_gbps", "sol", "tflops", "err_rms", "err_max")
_COMPARED = ("against", "against_p50_us", "against_graph_p50_us", "speedup", "graph_speedup")
_TRAINING = ("workload", "preset", "loss")
KEYS = (*IDENTITY, *_MEASURED, *_COMPARED, *_TRAINING, *ENVIRONMENT)

_COUNTED = ("kernel", "dram_bytes", "dram_pct", "l2_hit_pct", "l2_warm_hit_pct", "l1_warm_hit_pct", "occupancy_pct",
            "registers", "ncu_us", "block_cycles", "blocks", "tensor_pct", "issue_pct", "shared_pct", "l1_hit_pct", "waves",
            "tensor_insts", "tensor_flops", "fadds", "fmuls", "ffmas", "exps", "stall_long_scoreboard", "stall_barrier",
            "stall_wait", "stall_math_pipe_throttle", "stall_gmma", "stall_no_instruction")

# What a bench adds. err_seqlen: tokens that the error was taken over; note: why a value is missing; saved_mib: what a forward
# keeps for the backward beside its inputs and output; step and changed: as `ablate.Step` has them; shard: which part of the
# tests ran, if not all; only: what they were chosen by, if they were; reasons: how many were skipped for each; found: errors
# and warnings of a tool; of_roles: as many of them as are Triton's own; kernels: those that it named; launched: those that
# ran; part: of `block.PARTS`; apart: how far our result is from upstream's; run: every setting of `training_run.Run`; floor: a
# loss that no model gets below; unit: what units_per_s counts, tokens, say; gpus and way: how many trained together, see
# `parallel`; link_gbps: see `parallel.Team`; ssm_us: of the kernels of SSD or selective scan in a step; sitting: when rows
# began that were taken side by side; tensor_flops, tensor_insts, fadds, fmuls, ffmas, exps and stall_*: see `counters`; phase
# (a scope), operator (a class, or idle), us and share: see `characterize.collect`; flops_found: by counters, over those of a
# product of n cubed; configs, failures, seed, family, variants, modes, failed, closest: see `fuzz.campaign`; host_us: until a
# call returns; ran: the kernels that ran, as `Variant.kernels` names them; base: a commit, whose times base_* are, medians of
# that many rounds.
EXTRA_KEYS = {
    "ssd": ("err_seqlen", "note", "saved_mib", "ran"),
    "ablate": ("step", "changed", "err_seqlen", "note", "saved_mib", "ran"),
    "counters": _COUNTED,
    "tests": ("passed", "failed", "skipped", "reasons", "seconds", "shard", "only", "cores"),
    "setup": ("seconds", "mib", "packages", "cores"),
    "block": ("part", "apart", "note"),
    "block_counters": (*_COUNTED, "part"),
    "scaling": ("part", "note"),
    "step": ("run", "unit", "units_per_s", "ssm_us", "sitting", "note"),
    "train": ("run", "first_loss", "floor", "unit", "units_per_s", "parameters", "gpus", "way", "link_gbps"),
    "sanitize": ("tool", "found", "of_roles", "kernels", "launched"),
    "characterize": ("mixer", "run", "phase", "operator", "us", "share", "steps"),
    "step_counters": (*_COUNTED, "mixer", "operator", "run"),
    "ssm_counters": (*_COUNTED, "mixer", "operator", "run"),
    "calibration": ("n", "flops_found"),
    "regress": ("host_us", "base", "base_p50_us", "base_graph_p50_us", "base_host_us", "rounds"),
    "fuzz": ("part", "configs", "failures", "seconds", "seed", "family", "variants", "modes", "failed", "closest"),
}


def environment() -> dict:
    """The keys of ENVIRONMENT, as they are now. Without a GPU, gpu, driver and sm_mhz are None."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    driver, sm_mhz = _nvidia_smi() if gpu else (None, None)
    sha, dirty = _git_state()
    return {
        "git_sha": sha, "dirty": dirty, "gpu": gpu, "driver": driver, "torch": torch.__version__, "triton": _triton(),
        "sm_mhz": sm_mhz, "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def append(row: dict, out: Path = RESULTS) -> Path:
    """Appends a row to <out>/<gpu>/<bench>.jsonl in one write, so that rows of several processes never mix.

    Raises:
        ValueError: an unknown key, or one missing that every row has.
    """
    from ssd.runtime.tuning import device_slug

    allowed = {*KEYS, *EXTRA_KEYS.get(row.get("bench"), ())}
    unknown, missing = sorted(row.keys() - allowed), sorted({"bench", *ENVIRONMENT} - row.keys())
    if unknown or missing:
        raise ValueError(f"row: unknown keys {unknown}, missing keys {missing}")
    path = out / device_slug(row["gpu"] or "cpu") / f"{row['bench']}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(row, allow_nan=False) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
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


def read_gpus(out: Path = RESULTS) -> list[dict]:
    """The rows of a folder that were measured on a GPU: what documents are written from. Raises as `read`."""
    return [row for row in _load(out) if row.get("gpu")]


def _load(out: Path) -> list[dict]:
    rows = []
    for path in sorted(out.glob("*/*.jsonl")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not a JSON row: {error}") from None
            if not isinstance(row, dict) or not isinstance(row.get("time"), str):
                raise ValueError(f"{path}:{number}: got {line[:60]!r}, expected a JSON object with a time")
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
    return ", ".join(f"{name}={value}" for name, value in (options or {}).items() if value != default[name])


@cache
def _default_options() -> dict:
    from ssd import Options

    return asdict(Options())


def settings(row: dict, *but: str) -> tuple:
    """A run's settings but for these, to be told apart by."""
    return tuple(sorted((name, str(value)) for name, value in row["run"].items() if name not in but))


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


def _nvidia_smi() -> tuple[str | None, int | None]:
    """Driver version, and the multiprocessors' clock in MHz at this moment."""
    import torch

    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    command = ["nvidia-smi", "-i", uuid, "--query-gpu=driver_version,clocks.sm", "--format=csv,noheader,nounits"]
    try:
        driver, clock = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None, None
    return driver, int(clock) if clock.isdigit() else None


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


def _triton() -> str | None:
    """Its version without importing it: whether it interprets is decided at import."""
    with suppress(PackageNotFoundError):
        return version("triton")
    return None
