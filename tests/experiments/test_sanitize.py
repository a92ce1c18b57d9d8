"""compute-sanitizer's summaries as text, since it needs a GPU itself: a script of that name stands in for it."""

import inspect
from itertools import product
from operator import itemgetter

import pytest
import torch

from experiments import hand_over, record, sanitize
from experiments.kernel_names import present_name
from fused.kernels.hopper import scan as hopper_scan
from fused.schedule import deal
from ssd.kernels.arguments import cdiv
from ssd.types import SUB_CHUNK

CLEAN = {
    "memcheck": "========= ERROR SUMMARY: 0 errors",
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"}
DIRTY = {
    "memcheck": "========= Invalid __global__ read of size 4 bytes\n=========     at chunk_scan_kernel+0x120\n"
                "========= ERROR SUMMARY: 3 errors",
    "racecheck": "========= Error: Race reported between Write access at chunk_scan_kernel+0x4d80 in a.py:302\n"
                 "=========     and Read access at chunk_scan_kernel+0x21a0 in a.py:201 [96 hazards]\n"
                 "========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)"}


@pytest.fixture
def says(tmp_path, monkeypatch):
    """Puts a compute-sanitizer on the PATH that says this text for each tool, and ends with this status."""

    def install(text: dict[str, str], status: int = 0) -> None:
        for tool, said in text.items():
            (tmp_path / tool).write_text(said)
        script = tmp_path / "compute-sanitizer"
        script.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncat {tmp_path}/$2\nexit {status}\n')
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return install


@pytest.mark.parametrize("tool", sanitize.TOOLS)
def test_summaries(tool, says):
    says(CLEAN)
    assert sanitize.check("fused", tool)[:3] == (0, 0, "")
    says(DIRTY, status=1)
    found, of_roles, kernels, launched, said = sanitize.check("fused", tool)
    assert launched == []
    assert (found, of_roles) == ({"memcheck": 3, "racecheck": 2}[tool], 0)
    assert kernels == "chunk_scan_kernel" and "SUMMARY" in said


def _race(kernel: str, module, *source: str) -> str:
    """racecheck's report of accesses at the lines of a module where these pieces of source are."""
    lines = inspect.getsource(module).splitlines()
    file = inspect.getfile(module).rpartition("/")[2]
    at = [f"access at {kernel}+0x{n}f0 in {file}:{next(i for i, line in enumerate(lines, 1) if piece in line)}"
          for n, piece in enumerate(source)]
    others = "".join(f"\n=========     and Write {access} [7 hazards]" for access in at[1:])
    return f"========= Error: Race reported between Read {at[0]}{others}\n"


def test_the_start_of_roles_is_counted_apart(says, tmp_path, console):
    """Triton's own code, for the lines of `def` and `warp_specialize`; nothing that any other line has part in."""
    scan = "hopper_scan_kernel", hopper_scan
    started = _race(*scan, "def hopper_scan_kernel(", "def hopper_scan_kernel(", "gl.warp_specialize([")
    ours = _race(*scan, "def hopper_scan_kernel(", "gl.warp_specialize([", "vectors = allocate_vectors")
    at = "access at hopper_scan_kernel+0x10"
    first, then = "========= Error: Race reported between Read ", "=========     and Write "
    theirs = f"{first}{at} in standard.py:7\n{then}{at} in /a/b.py:9\n{first}{at}\n{then}{at} [2 hazards]\n"
    theirs += _race(*scan, "def hopper_scan_kernel(") + then + "access at void reduce<int>()+0x200 [1 hazards]\n"
    control = _race("hand_over_kernel", hand_over, "def hand_over_kernel(", "gl.warp_specialize([")
    summary = "========= RACECHECK SUMMARY: {0} hazards displayed ({0} errors, 0 warnings)"
    says({"racecheck": started + control + summary.format(2)})
    assert sanitize.run(["control"], ["racecheck"], tmp_path / "rows", console)
    says({"racecheck": started + ours + theirs + summary.format(5)})
    assert not sanitize.run(["fused"], ["racecheck"], tmp_path / "rows", console)
    assert [(row["found"], row["of_roles"]) for row in record.read(tmp_path / "rows", bench="sanitize")] == [(2, 2), (5, 1)]


def test_no_summary_is_no_pass(says):
    says({"memcheck": "Error: Device not supported"}, status=1)
    with pytest.raises(ValueError, match="memcheck of baseline ended with exit status 1"):
        sanitize.check("baseline", "memcheck")


def test_rows_and_table(says, tmp_path, console):
    says(CLEAN)
    assert sanitize.run(["baseline", "fused"], list(sanitize.TOOLS), tmp_path / "rows", console)
    says({**CLEAN, "racecheck": DIRTY["racecheck"]})
    assert not sanitize.run(["fused"], list(sanitize.TOOLS), tmp_path / "rows", console)
    rows = record.read(tmp_path / "rows", bench="sanitize")
    assert [(row["variant"], row["tool"], row["found"]) for row in rows] == [
        ("baseline", "memcheck", 0), ("baseline", "racecheck", 0), ("fused", "memcheck", 0), ("fused", "racecheck", 0),
        ("fused", "memcheck", 0), ("fused", "racecheck", 2)]
    assert "2 errors and warnings" in console.export_text()
    assert (tmp_path / "calls").read_text().count('-m experiments once sanitize:run_every_kernel {"variant": "fused"}') == 4


def test_a_kernel_that_never_ran_is_no_pass(says, tmp_path, console, monkeypatch):
    """Where all that launches kernels is run."""
    monkeypatch.setattr(sanitize, "is_hopper", lambda device: True)

    def fake_launches(names: set[str]) -> dict[str, str]:
        return {"memcheck": f"launched {' '.join(sorted(names))}\n{CLEAN['memcheck']}"}

    every = [*sanitize.list_candidates(), sanitize.BLOCK]
    says(fake_launches(sanitize.list_ours()))
    assert sanitize.run(every, ["memcheck"], tmp_path / "rows", console)
    says(fake_launches(sanitize.list_ours() - {"bmm_chunk_kernel"}))
    assert sanitize.run(["baseline"], ["memcheck"], tmp_path / "rows", console), "of one variant nothing is missing"
    assert not sanitize.run(every, ["memcheck"], tmp_path / "rows", console)
    assert "never launched: bmm_chunk_kernel" in console.export_text()
    monkeypatch.setattr(sanitize, "is_hopper", lambda device: False)
    says(fake_launches({name for name in sanitize.list_ours() if not name.startswith(sanitize._OF_HOPPER)}))
    assert sanitize.run(every, ["memcheck"], tmp_path / "rows", console), "which no other GPU can run"
    rows = record.read(tmp_path / "rows", bench="sanitize")
    assert set(rows[0]["launched"]) == sanitize.list_ours() and rows[0]["kernels"] == ""


@pytest.mark.parametrize("step", ("scan_step", "kept_scan_step", "every_state_step"))
@pytest.mark.parametrize("gpu", ("h100", "h200"))
def test_sequences_are_cut(gpu, step):
    """Or hopper_pieces would not run, as it did not while these sequences had 600 tokens."""
    pairs, nsub = sanitize.CUT.nheads // 2, cdiv(sanitize.CUT.seqlen, SUB_CHUNK)
    assert deal(sanitize.CUT.batch, pairs, nsub, 132, gpu, step, True, 1, torch.device("cpu")).pieces is not None


def test_the_committed_rows_are_clean():
    """The last of each: both tools on all variants, every kernel launched, nothing found
    but the start of roles.
    """
    rows = record.latest(record.read(bench="sanitize"), itemgetter("variant", "tool"))
    assert {(row["variant"], row["tool"]) for row in rows} == set(product(sanitize.VARIANTS, sanitize.TOOLS))
    launched = {present_name(name) for row in rows for name in row["launched"]}
    assert sanitize.list_ours() <= launched
    assert all(row["found"] == row["of_roles"] for row in rows)
    control = next(row for row in rows if row["variant"] == sanitize.CONTROL and row["tool"] == "racecheck")
    assert control["found"] == 1 and not any(row["found"] for row in rows if row["tool"] == "memcheck")
