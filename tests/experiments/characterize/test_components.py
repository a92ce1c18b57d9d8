"""The components of blocks: that each runs, what rows they leave, what the report makes of them."""

from itertools import product
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console

from experiments import record
from experiments.characterize import components
from experiments.characterize.report import scaling
from tests.experiments.clock import install

SIZES = {"_INNER": 32, "_HEADDIM": 16, "_DSTATE": {"mamba1": 4, "mamba2": 16}, "CHUNK_SIZE": 16}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Every component at 4 and 8 tokens, by a made-up clock of 2 us a call: the folder, and the rows."""
    small = {name: part for name, part in components.COMPONENTS.items() if "proj" not in name[1]}
    for block, (part, inputs, outputs) in product(("mamba1", "mamba2"), (("in_proj", 16, 64), ("out_proj", 32, 16))):
        small[block, part] = components._make_linear(inputs, outputs)
    small |= {("mamba1", "x_proj"): components._make_linear(32, 9), ("mamba1", "dt_proj"): components._make_linear(9, 32)}

    folder = tmp_path_factory.mktemp("rows")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(components, "COMPONENTS", small)
        for name, value in SIZES.items():
            patch.setattr(components, name, value)
        install(patch, lambda name, in_graph: 2.0, "NVIDIA H200")
        return folder, components.run((4, 8), "fp32", folder, Console(quiet=True))


def test_rows(measured):
    folder, rows = measured
    assert len(rows) == 2 * 2 * 11
    assert {(row["shape"], row["part"]) for row in rows} == set(components.COMPONENTS)
    assert {(row["seqlen"], row["mode"]) for row in rows} == set(product((4, 8), ("fwd", "fwd_bwd")))
    assert components.read_latest(folder) == rows


def test_report(measured):
    """Four projections of Mamba-1 are one line, of 8 us, beside 2 us each of the convolution and the scan."""
    found = scaling.collect_components(record.read(measured[0]))
    figures = found["panels"]
    assert [*figures] == ["scaling-training", "scaling-inference", "scaling-components-memory"]
    lines = {(line["block"], line["component"]): line for line in figures["scaling-training"].data if line["seqlen"] == 8}
    assert lines["Mamba-1", "projections"]["us"] == 8 and lines["Mamba-2", "projections"]["peak_mib"] == 3
    assert ("Mamba-1", "norm") not in lines and len(lines) == 7
    ends = {block: [(round(share), tokens) for share, tokens in at] for block, at in found["shares"]["training"].items()}
    assert ends == {"Mamba-1": [(17, 4), (17, 8)], "Mamba-2": [(20, 4), (20, 8)]}


def test_one_that_fails_costs_no_other(measured, tmp_path, monkeypatch, console):
    broken, whole = Mock(side_effect=torch.OutOfMemoryError("no room")), components._make_linear(8, 4)
    monkeypatch.setattr(components, "COMPONENTS", {("mamba1", "ssm"): broken, ("mamba1", "out_proj"): whole})
    install(monkeypatch, lambda name, in_graph: 2.0)
    rows = components.run((4,), "fp32", tmp_path, console)
    assert {row["part"] for row in rows} == {"out_proj"} and "mamba1 ssm 4 is left out: no room" in console.export_text()
