"""What a set-up took, from its files; and what the README says of it."""

import os

import pytest

from experiments import result_tables, setup_size


def test_measured_between_the_first_file_and_the_last(tmp_path):
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    (site / "one-1.0.dist-info").mkdir(parents=True)
    (site / "one-1.0.dist-info" / "METADATA").write_text("Name: one\nVersion: 1.0\n")
    (site / "large.so").write_bytes(b"x" * (3 << 20))
    with pytest.raises(FileNotFoundError):
        setup_size.measure(tmp_path)
    for name, second in (("pyvenv.cfg", 1000), (".installed", 1090)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (second, second))
    found = setup_size.measure(tmp_path)
    assert found == {"seconds": 90.0, "mib": found["mib"], "packages": 1, "cores": os.cpu_count()} and 3 <= found["mib"] <= 4
    assert setup_size.describe(found | {"mib": 2000}) == "1 packages, 2.1 GB, in 1.5 minutes"


def test_the_last_rows_count():
    setup = {"bench": "setup", "seconds": 90.0, "mib": 2000, "packages": 7, "cores": 2, "torch": "2.13.0+cpu"}
    tests = {"bench": "tests", "seconds": 510.0, "passed": 10, "skipped": 4, "cores": 2}
    said = " ".join(result_tables.describe_setup([setup, tests, tests | {"seconds": 540.0}]).split())
    assert said == ("Measured on 2 cores without a GPU: 7 packages, 2.1 GB, in 1.5 minutes, with torch 2.13.0+cpu. `make test` "
                    "took 9.0 minutes on 2 cores without a GPU: 10 passed, 4 skipped, which is normal there.")
