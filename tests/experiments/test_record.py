import json
import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from experiments import record, table
from tests.experiments.rows import ssd_row


def test_append_and_read(tmp_path):
    row = ssd_row()
    assert record.append(row, tmp_path) == tmp_path / "h200" / "ssd.jsonl"
    record.append(ssd_row("mamba_ssm", time="2025-12-31T00:00:00+00:00"), tmp_path)
    assert [r["variant"] for r in record.read(tmp_path)] == ["mamba_ssm", "baseline"]
    assert record.read(tmp_path, variant="baseline") == [row]
    assert record.read(tmp_path / "nowhere") == []


def test_a_time_that_is_there_twice_counts_once(tmp_path):
    """As after a file was joined with its copy. Other rows may be the same."""
    timed, counted = ssd_row(), {key: value for key, value in ssd_row(bench="sanitize").items() if not key.startswith("p50")}
    for row in (timed, counted):
        path = tmp_path / "h200" / f"{row['bench']}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(2 * (json.dumps(row) + "\n"))
    assert sorted(row["bench"] for row in record.read(tmp_path)) == ["sanitize", "sanitize", "ssd"]


def test_appends_never_mix(tmp_path):
    rows = [ssd_row(note="x" * 3000, launches=n) for n in range(200)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda row: record.append(row, tmp_path), rows))
    lines = (tmp_path / "h200" / "ssd.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["launches"] for line in lines) == list(range(200))


@pytest.mark.parametrize("added, without, said", [
    ({"speed": 3}, (), r"unknown keys \['speed'\]"), ({"passed": 3}, (), r"unknown keys \['passed'\]"),
    ({}, ("gpu", "time"), r"missing keys \['gpu', 'time'\]"), ({"err_rms": float("nan")}, (), "JSON compliant")])
def test_what_is_no_row_is_refused(tmp_path, added, without, said):
    with pytest.raises(ValueError, match=said):
        record.append({key: value for key, value in ssd_row(**added).items() if key not in without}, tmp_path)
    assert not list(tmp_path.rglob("*.jsonl"))


def test_a_row_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    """A full disk takes a part of it."""
    record.append(ssd_row(), tmp_path)
    write = os.write
    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"ssd\.jsonl"):
        patch.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:100]))
        record.append(ssd_row("torch"), tmp_path)
    record.append(ssd_row("fused"), tmp_path)
    assert [row["variant"] for row in record.read(tmp_path)] == ["baseline", "fused"]


def test_latest():
    rows = [ssd_row(p50_us=1.0), ssd_row("torch", p50_us=2.0), ssd_row(p50_us=3.0)]
    assert [r["p50_us"] for r in record.latest(rows, lambda r: r["variant"])] == [3.0, 2.0]


def test_commit_of_a_copy_without_git(monkeypatch):
    monkeypatch.setenv("GIT_SHA", "abc-dirty")
    assert record._git_state.__wrapped__() == ("abc", True)
    monkeypatch.setenv("GIT_SHA", "abc")
    assert record._git_state.__wrapped__() == ("abc", False)


@pytest.mark.parametrize(("now", "most", "found"), ((1005, 1980, {"slow_mhz": 1005}), (1965, 1980, {}), (None, None, {})))
def test_rows_of_a_gpu_that_is_held_back(now, most, found, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(record, "_nvidia_smi", lambda: ("580.1", now, most))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert record.find_slow_clock() == found
    record.append(ssd_row() | found, tmp_path)
    assert ("clock fell to 1005 MHz" in caplog.text) == bool(found)
    assert len(record.read(tmp_path)) == 1 and len(record.read_gpus(tmp_path)) == (not found)
    record.append(ssd_row(time="2025-12-31T00:00:00+00:00", p50_us=500.0), tmp_path)
    (row,) = table.read_latest(tmp_path)
    assert row["p50_us"] == (500.0 if found else 1000.0), "the last of those at the highest clock"


def test_clocks_are_read(tmp_path, monkeypatch):
    said = tmp_path / "nvidia-smi"
    said.write_text("#!/bin/sh\necho 580.1, 1005, 1980\n")
    said.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid="0"))
    assert record._nvidia_smi() == ("580.1", 1005, 1980)
    said.write_text("#!/bin/sh\necho 580.1, [N/A], [N/A]\n")
    assert record._nvidia_smi() == ("580.1", None, None)
