"""The causal convolution against its definition in fp64: values, every gradient, and how it behaves inside torch."""

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from experiments.fuzz.block.conv1d import define as definition
from ssd.block import conv1d as module
from ssd.block.conv1d import causal_conv1d_fn, compute_in_torch
from ssd.block.kernels import conv1d as kernels
from tests.block import calls
from tests.inputs import GPU, HALF, describe, generator

pytestmark = pytest.mark.usefixtures("poison")
LEAVES = ("x", "weight", "bias", "initial_states")


@dataclass(frozen=True)
class Case:
    """Sizes and options of a call. documents: lengths of a row's documents, the last cut short; a negative one is padding."""

    batch: int = 2
    dim: int = 20
    seqlen: int = 40
    width: int = 4
    activation: str | None = "silu"
    bias: bool = True
    documents: tuple[int, ...] = ()
    initial_states: bool = False
    final_states: bool = False
    packed: int = 12
    dtype: torch.dtype = torch.float32
    parameter_dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return describe(self)


EVERYTHING = Case(documents=(2, 29, 1, 5, -3, 60), initial_states=True)
CONTINUED = Case(initial_states=True, final_states=True)
CASES = [
    Case(),
    Case(width=2, activation=None),
    Case(width=3, bias=False, final_states=True),
    Case(activation=None, bias=False, initial_states=True),
    Case(dim=1, seqlen=1, activation="swish"),
    Case(dim=130, seqlen=33, batch=1, packed=3),  # a program of two channels, a piece of one token, odd strides
    replace(EVERYTHING, initial_states=False),
    EVERYTHING,
    replace(EVERYTHING, width=2, activation=None, bias=False),
    replace(EVERYTHING, width=3, documents=(-4, 1, 1, 28, -40)),
    *(replace(CONTINUED, seqlen=seqlen, width=width) for seqlen, width in ((1, 2), (1, 3), (2, 4), (3, 4), (64, 4))),
]
if GPU:
    CASES += [Case(1, 10240, 4096, packed=8320), Case(4, 1792, 2048, packed=1560), Case(1, 512, 65536 + 21, packed=640),
              replace(EVERYTHING, dim=5376, seqlen=2000, documents=(800, 1, 1, 1000, -100, 900))]
HALVES = [replace(case, dtype=HALF, parameter_dtype=HALF if n % 2 else torch.float32)
          for n, case in enumerate(CASES) if GPU or n in (0, 7, 13, 14)]


def inputs(case: Case, device: str) -> dict:
    """Arguments of `causal_conv1d_fn` by name. x is a slice of a wider projection, as a Mamba-2 block has it."""
    rng = generator(device, str(case))

    def normal(*size, dtype=case.dtype):
        return torch.randn(size, generator=rng, device=device).to(dtype)

    projection = normal(case.batch, case.seqlen, case.dim + case.packed)
    return {
        "x": projection[..., case.packed :].mT,
        "weight": normal(case.dim, case.width, dtype=case.parameter_dtype),
        "bias": normal(case.dim, dtype=case.parameter_dtype) if case.bias else None,
        "seq_idx": number_documents(case, device) if case.documents else None,
        "initial_states": normal(case.batch, case.dim, case.width - 1) if case.initial_states else None,
        "return_final_states": case.final_states,
        "activation": case.activation,
    }


def number_documents(case: Case, device: str) -> Tensor:
    """seq_idx; row b begins with the b-th of the documents, whose numbers are neither in order nor those of another row."""
    rows = []
    for b in range(case.batch):
        rotated = case.documents[b:] + case.documents[:b]
        row = torch.cat([torch.full((abs(n),), -1 if n < 0 else 7 * (9 - i) + b) for i, n in enumerate(rotated)])
        rows.append(row[: case.seqlen])
    return torch.stack(rows).to(device, torch.int32)


def mirror(x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, activation=None):
    results = compute_in_torch(x, weight, bias, seq_idx, initial_states, activation is not None, return_final_states)
    return results if return_final_states else results[0]


def run(function, given: dict, ways: tuple[Tensor, ...] | None = None):
    return calls.run(function, given, LEAVES, ("out", "final_states"), ways)


def assert_right(given: dict) -> None:
    calls.assert_right(causal_conv1d_fn, mirror, definition, given, LEAVES, ("out", "final_states"), ("dweight", "dbias"),
                       given["x"].shape[0] * given["x"].shape[2])


@pytest.mark.parametrize("case", CASES + HALVES, ids=str)
def test_every_option(case, device):
    assert_right(inputs(case, device))


@pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter says where NaN comes from
def test_documents_are_as_if_run_apart(device):
    """Bit for bit, also where another document holds NaN and Inf; only what is summed over documents is in another order."""
    given = inputs(replace(EVERYTHING, dtype=HALF), device)
    got, (dout,) = run(causal_conv1d_fn, given)
    apart = {name: torch.zeros_like(got[name]) for name in got}
    for b, row in enumerate(given["seq_idx"]):
        for number in row[row >= 0].unique():
            (tokens,) = (row == number).nonzero(as_tuple=True)
            at = slice(int(tokens[0]), int(tokens[-1]) + 1)
            first = {"initial_states": given["initial_states"][b : b + 1] if number == row[0] else None, "seq_idx": None}
            part, _ = run(causal_conv1d_fn, given | {"x": given["x"][b : b + 1, :, at]} | first, (dout[b : b + 1, :, at],))
            apart["out"][b, :, at], apart["dx"][b, :, at] = part["out"][0], part["dx"][0]
            apart["dinitial_states"][b] += part["dinitial_states"][0] if number == row[0] else 0
            apart["dweight"] += part["dweight"]
    for name in ("out", "dx", "dinitial_states"):
        assert torch.equal(got[name], apart[name]), name
    assert_close(got["dweight"], apart["dweight"], rtol=1e-4, atol=1e-4)

    broken = given["x"].clone()
    others = given["seq_idx"] != given["seq_idx"][0, 10]
    broken[:, :, ::2] = torch.where(others[:, None, ::2], float("nan"), broken[:, :, ::2])
    broken[:, :, 1::2] = torch.where(others[:, None, 1::2], float("inf"), broken[:, :, 1::2])
    again, _ = run(causal_conv1d_fn, given | {"x": broken}, (dout,))
    for name in ("out", "dx"):
        assert torch.equal(again[name].mT[~others], got[name].mT[~others]), name
        assert again[name].mT[given["seq_idx"] < 0].eq(0).all(), "padding"


@pytest.mark.parametrize("pieces", ((7, 1, 32), (2, 38)), ids=str)
def test_pieces_of_a_prompt_give_the_whole(pieces, device):
    """Through initial and final states: outputs bit for bit, and the gradient of each piece through those after it."""
    given = inputs(replace(CONTINUED, dtype=HALF), device)
    whole, (dout, dfinal) = run(causal_conv1d_fn, given)

    def cut(x, initial_states, **others):
        outs = []
        for piece in x.split(pieces, 2):
            out, initial_states = causal_conv1d_fn(piece, initial_states=initial_states, **others)
            outs.append(out)
        return torch.cat(outs, 2), initial_states

    got, _ = run(cut, given, (dout, dfinal))
    assert torch.equal(got["out"], whole["out"]) and torch.equal(got["final_states"], whole["final_states"])
    for name in ("dx", "dweight", "dbias", "dinitial_states"):
        tolerance = 2 * torch.finfo(HALF).eps  # the gradient between pieces is rounded once more
        assert_close(got[name], whole[name], rtol=tolerance, atol=tolerance)


def test_layouts(device, monkeypatch):
    """Bit for bit as contiguous channels; slices of a projection are read in place; gradients come as one number, expanded."""
    given = inputs(replace(CONTINUED, final_states=False), device)
    read = []
    forward = module.conv1d_fwd
    monkeypatch.setattr(module, "conv1d_fwd", lambda x, *args: read.append(x.data_ptr()) or forward(x, *args))
    ways = (torch.ones((), device=device).expand(given["x"].shape),)
    plain, _ = run(causal_conv1d_fn, given | {"x": given["x"].mT.contiguous().mT}, ways)
    wide = torch.randn(2, 20, 81, device=device)
    x, weight, bias, initial_states = (given[name] for name in LEAVES)
    for layout, in_place in ((x, True), (x.contiguous(), False), (wide[:, :, 1::2].copy_(x), False)):
        strided = {"x": layout, "weight": weight.mT.contiguous().mT, "bias": bias.repeat_interleave(2)[::2],
                   "initial_states": initial_states.mT.contiguous().mT}
        got, _ = run(causal_conv1d_fn, given | strided, ways)
        assert all(torch.equal(got[name], plain[name]) for name in plain) and got["out"].stride() == (40 * 20, 1, 20)
        assert (read[-1] == layout.data_ptr()) == in_place
    repeated = x[:1, :, :1].expand(2, 20, 40)
    assert torch.equal(causal_conv1d_fn(repeated, weight), causal_conv1d_fn(repeated.contiguous(), weight))


def test_final_states_out(device):
    given = inputs(replace(CONTINUED, seqlen=5), device)
    place = torch.randn(2, 20, 3, device=device)
    kept = place.clone()
    out, final_states = causal_conv1d_fn(**given)
    causal_conv1d_fn(**given | {"return_final_states": False}, final_states_out=place)
    assert torch.equal(place, kept)
    again, placed = causal_conv1d_fn(**given, final_states_out=place)
    assert placed is place and torch.equal(place, final_states) and torch.equal(again, out)
    x = given["x"].detach().requires_grad_()
    causal_conv1d_fn(**given | {"x": x}, final_states_out=place.half())[1].sum().backward()
    assert x.grad[:, :, -3:].eq(1).all() and not x.grad[:, :, :-3].any()
    with pytest.raises(ValueError, match="final_states_out: got a stride of 0 along axis 0"):
        causal_conv1d_fn(**given, final_states_out=place[:1].expand_as(place))


@pytest.mark.parametrize("case", (Case(dim=3), replace(EVERYTHING, dim=3, documents=(255, 45))), ids=str)
def test_longest_pieces(case, device, monkeypatch):
    """As on a GPU that has enough to do. The second document begins with the last token of a piece."""
    monkeypatch.setattr(kernels, "_SHORTEST", 256)
    assert kernels.pieces(torch.empty(1, 262, 3, device=device), 1) == (256, 2)
    assert_right(inputs(replace(case, batch=1, seqlen=262), device))


@pytest.mark.parametrize("width", (2, 4))
def test_documents_with_states(width, device):
    """As each run alone, bit for bit, with every gradient; empty ones, and some shorter than the filter."""
    bounds = (0, 0, 1, 3, 3, 36, 40, 40)
    given = inputs(replace(CONTINUED, batch=7, width=width), device)
    given["x"] = given["x"][:1]

    def run_alone(x, initial_states, **others):
        outs, states = [], []
        for state, (start, end) in zip(initial_states.split(1), pairwise(bounds), strict=True):
            if start < end:
                out, state = causal_conv1d_fn(x[:, :, start:end], initial_states=state, **others)
                outs.append(out)
            states.append(state)
        return torch.cat(outs, 2), torch.cat(states)

    cu_seqlens = torch.tensor(bounds, device=device)
    alone, ways = run(run_alone, given)
    got, _ = run(partial(causal_conv1d_fn, cu_seqlens=cu_seqlens), given, ways)
    assert torch.equal(got["out"], alone["out"]) and torch.equal(got["final_states"], alone["final_states"])
    for name in ("dx", "dweight", "dbias", "dinitial_states"):
        assert_close(got[name], alone[name], rtol=1e-5, atol=1e-5)
    del given["initial_states"], given["return_final_states"]
    none, cu_seqlens = torch.zeros(7, 20, width - 1, device=device), cu_seqlens.int()
    assert_close(causal_conv1d_fn(**given, cu_seqlens=cu_seqlens),
                 causal_conv1d_fn(**given, cu_seqlens=cu_seqlens, initial_states=none))
