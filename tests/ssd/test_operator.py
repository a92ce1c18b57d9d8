"""Every variant of ours against fp64, forward and backward: small sizes in the interpreter, real ones on a GPU."""

from dataclasses import fields, replace
from itertools import product, zip_longest

import pytest
import torch

from ssd import ssd_chunk_scan
from ssd.registry import config_spaces, get_variant
from ssd.runtime import tuning
from ssd.types import Options, SSDGrads
from tests import errors
from tests.errors import assert_apart, assert_lands, assert_right, cotangents, one_cotangent, results, truths
from tests.inputs import EVERYTHING, GPU, OURS, Case, Shape, every_option_pairwise, random_inputs

pytestmark = pytest.mark.usefixtures("poison")
# The interpreter's bf16 arithmetic is wrong, so bf16 waits for a GPU.
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if GPU else (torch.float32, torch.float16)

SHAPES = [
    Shape(2, 1, 8, 16, 2, 16, 16),
    Shape(1, 33, 2, 5, 1, 17, 16),
    Shape(2, 40, 4, 19, 2, 24, 32),
    Shape(1, 63, 2, 56, 2, 16, 64),
    Shape(1, 150, 1, 64, 1, 40, 128),
    Shape(1, 300, 1, 16, 1, 16, 256),
    Shape(1, 20, 2, 72, 1, 136, 16),
]
LARGE_SHAPES = [
    Shape(1, 63, 8, 64, 1, 128, 64),
    Shape(2, 150, 16, 64, 2, 128, 128),
    Shape(1, 4097, 16, 64, 8, 128, 256),
    Shape(2, 512, 8, 128, 8, 64, 128),
    Shape(1, 600, 4, 256, 1, 16, 256),
    Shape(1, 600, 4, 256, 2, 256, 256),
    Shape(3, 257, 6, 19, 2, 67, 32),
    Shape(1, 500, 8, 5, 8, 200, 64),
    Shape(2, 320, 24, 56, 1, 33, 16),
    Shape(1, 65536, 4, 64, 1, 128, 256),
]
PROJECTION = Case(packed=True, dt_softplus=True, dt_bias=True, D="h", z=True)  # as a Mamba-2 block calls it
CASES = [
    *every_option_pairwise(state_dtype=(None, torch.float32), packed=(False, True)),
    EVERYTHING,
    Case(strong_decay=True, D="h"),
    Case(strong_decay=True, documents="seq_idx", initial_states=True, z=True),
    Case(dt_dtype=torch.float32, state_dtype=torch.float16),
    Case(dt_dtype=torch.float16, BC_dtype=torch.float32, initial_states=True),
]

over_variants = pytest.mark.parametrize("name", OURS)
over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@over_variants
@pytest.mark.parametrize("D, dtypes", [("h", DTYPES[:1]), ("hp", DTYPES[1:])], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(name, shape, D, dtypes, device):
    for dtype in dtypes:
        assert_right(name, random_inputs(shape, replace(EVERYTHING, D=D), dtype, device))


@pytest.mark.gpu
@over_variants
@pytest.mark.parametrize("dtype, case", [(torch.bfloat16, EVERYTHING), (torch.float32, EVERYTHING),
                                         (torch.float16, PROJECTION)], ids=str)
@pytest.mark.parametrize("shape", LARGE_SHAPES, ids=str)
def test_large_shapes(name, shape, case, dtype, device):
    assert_right(name, random_inputs(shape, case, dtype, device))


@over_variants
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_options(name, number, device):
    """On a GPU every case in every dtype; in the interpreter, which is slow, the dtypes take turns. So do chunk sizes."""
    case = CASES[number]
    for turn, dtype in enumerate(DTYPES) if GPU else [(0, DTYPES[number % 2])]:
        chunk_sizes = (64, 128, 256) if case.strong_decay else (16, 64, 128, 256)
        chunk_size = chunk_sizes[(number + turn) % len(chunk_sizes)]
        shape = Shape(2, 333, 8, 64, 2, 128, chunk_size) if GPU else Shape(2, 70, 2, 16, 1, 16, min(chunk_size, 64))
        if case.documents == "varlen":
            shape = replace(shape, batch=1)
        assert_right(name, random_inputs(shape, case, dtype, device))


@pytest.mark.gpu
@over_variants
@pytest.mark.parametrize("documents", (None, "seq_idx", "varlen"))
@pytest.mark.parametrize("D", (None, "h", "hp"))
def test_every_combination_of_options(name, D, documents, device):
    """Not only pairs, as above, at sizes that the kernels for Hopper take."""
    shape = Shape(1 if documents == "varlen" else 2, 150, 4, 64, 2, 128, 64)
    names = ("z", "dt_bias", "dt_softplus", "initial_states")
    for *flags, dt_limit in product(*[(False, True)] * len(names), ((0.0, float("inf")), (0.02, 0.06))):
        case = Case(D=D, documents=documents, dt_limit=dt_limit, **dict(zip(names, flags, strict=True)))
        for dtype in (torch.bfloat16, torch.float32):
            assert_right(name, random_inputs(shape, case, dtype, device))


@over_variants
@pytest.mark.parametrize("gradient", ("dout", "dfinal_states"))
def test_one_gradient_alone(name, gradient, device):
    inputs = random_inputs(Shape(1, 40, 2), Case(initial_states=True, D="h"), device=device)
    assert_right(name, inputs, *one_cotangent(inputs, gradient))


@over_variants
def test_two_runs_are_bit_identical(name, device):
    shape = Shape(2, 1000, 16, 64, 2, 128, 128) if GPU else Shape(1, 40, 4, 16, 2, 16, 32)
    inputs = random_inputs(shape, EVERYTHING, DTYPES[-1], device)
    ways = cotangents(inputs)
    first, second = (results(name, inputs, *ways) for _ in range(2))
    assert all(torch.equal(first[result], second[result]) for result in first)


@over_variants
def test_documents_of_a_row_are_as_if_run_apart(name, device):
    """The truth here knows no documents: each runs by itself, in fp64."""
    shape = Shape(1, 700, 8, 64, 2, 64, 128) if GPU else Shape(1, 75, 2, 16, 1, 16, 32)
    case = Case(D="h", z=True, dt_softplus=True, dt_bias=True, documents="varlen")
    inputs = random_inputs(shape, case, DTYPES[-1], device)
    assert_apart(name, inputs, inputs.cu_seqlens.tolist())


def spaces(inputs):
    """What a tuner may try for each kernel."""
    chip = tuning.current_device(inputs.x.device.index if inputs.x.is_cuda else None)
    sizes = (inputs.x.dtype, inputs.headdim, inputs.dstate, inputs.chunk_size, chip)
    return {kernel: space.configs(*sizes) for kernel, space in config_spaces().items()}


@pytest.mark.slow
@over_variants
@over_dtypes
@pytest.mark.parametrize("documents", (None, "seq_idx"))
def test_every_config(name, documents, dtype, device, monkeypatch):
    """The first configs of all kernels together, then the second ones ...: the tiles of two kernels need not match.

    In the interpreter dtypes and documents take turns.
    """
    shape = Shape(1, 700, 4, 64, 1, 128, 256) if GPU else Shape(1, 140, 1, 64, 1, 128, 128)
    inputs = random_inputs(shape, replace(EVERYTHING, documents=documents), dtype, device)
    rows = list(zip_longest(*spaces(inputs).values()))
    for row in rows if GPU else rows[2 * DTYPES.index(dtype) + (documents is None) :: 4]:
        together = [config or default for config, default in zip(row, rows[0], strict=True)]
        monkeypatch.setattr(tuning, "_forced", dict(zip(config_spaces(), together, strict=True)))
        assert_right(name, inputs)


@pytest.mark.gpu
@pytest.mark.slow
@over_variants
@pytest.mark.parametrize("batch, packed, ngroups", [(1, True, 16), (1, True, 8), (3, False, 8)])
def test_offsets_beyond_int32(name, batch, packed, ngroups, device, much_memory):
    """200,000 tokens of 80 heads: offsets pass 2^31 inside one row of a packed projection, and over three rows.

    Heads meet only in the gradients of the B and C they share, so the last group of heads is judged by itself. In 8 groups
    their number is even, which the kernels for Hopper take.
    """
    shape = Shape(batch, 200_000, 80, 64, ngroups, 128, 128)
    inputs = random_inputs(shape, Case(packed=packed, D="h", dt_softplus=True), torch.bfloat16, device)
    assert sum((n - 1) * stride for n, stride in zip(inputs.x.shape, inputs.x.stride(), strict=True)) > 2**31
    dout = torch.randn(inputs.x.shape, device=device, dtype=inputs.x.dtype)
    heads, group, everything = slice(80 - 80 // ngroups, 80), slice(ngroups - 1, ngroups), slice(None)
    by_head, by_group = (everything, everything, heads), (everything, everything, group)
    places = {"out": by_head, "dx": by_head, "ddt": by_head, "dB": by_group, "dC": by_group, "dA": heads, "dD": heads,
              "final_states": (everything, heads)}
    got = {result: t[places[result]].clone() for result, t in results(name, inputs, dout, None).items()}
    part = replace(inputs, x=inputs.x[by_head], dt=inputs.dt[by_head], B=inputs.B[by_group], C=inputs.C[by_group],
                   A=inputs.A[heads], D=inputs.D[heads])
    ways = (dout[by_head], None)
    errors.assert_all_accurate(got, truths(part, *ways), part, *ways)


def test_every_result_has_a_judge(device):
    """The truth names each output and each gradient there is."""
    inputs = random_inputs(Shape(1, 20), replace(EVERYTHING, documents="varlen"), device=device)
    grads = {f.name for f in fields(SSDGrads)}
    assert truths(inputs, *cotangents(inputs)).keys() == {"out", "final_states", "varlen_states"} | grads


@pytest.mark.parametrize("name", (*OURS, "torch"))
def test_gradients_go_where_they_are_asked_to(name, device):
    """Into slices of one packed gradient, the same values as into fresh memory."""
    inputs = random_inputs(Shape(1, 40, 2), PROJECTION, device=device)
    parts = {grad: getattr(inputs, grad[1:]) for grad in ("dz", "dx", "dB", "dC", "ddt")}
    widths = [t[0, 0].numel() for t in parts.values()]
    slices = torch.zeros(1, 40, sum(widths), device=device).split(widths, -1)
    assert_lands(get_variant(name), inputs, {
        grad: s.unflatten(-1, t.shape[2:]) for (grad, t), s in zip(parts.items(), slices, strict=True)})


# Calls that a random search once found wrong, each as it was found: kernels that a compiler made wrong, and other causes.
LIMITED = Case(dt_bias=True, dt_softplus=True, dt_limit=(0.0, 0.1), initial_states=True)
OTHER_STATES = replace(LIMITED, state_dtype=torch.float32)
PACKED = Case(D="h", dt_bias=True, dt_softplus=True, initial_states=True, documents="seq_idx", packed=True)
KEPT_STATES = Case(D="hp", z=True, initial_states=True, state_dtype=torch.bfloat16)
PLAIN_BACKWARD = Options(gluon=False, save_states=False)
FOUND = {
    "wide heads": (Shape(1, 64, 6, 256, 1, 64, 128), PACKED, torch.bfloat16, Options()),
    "a head a group": (Shape(1, 257, 3, 48, 3, 32, 256), LIMITED, torch.bfloat16, Options()),
    "states in fp32": (Shape(1, 257, 3, 48, 3, 32, 256), OTHER_STATES, torch.bfloat16, Options()),
    "one head, states in fp32": (Shape(1, 257, 1, 48, 1, 32, 256), OTHER_STATES, torch.bfloat16, Options()),
    "C in another dtype": (Shape(1, 257, 3, 48, 3, 32, 256), replace(LIMITED, C_dtype=torch.float16), torch.bfloat16,
                           Options()),
    "C B^T from memory": (Shape(1, 256, 72, 12, 6, 42, 256), KEPT_STATES, torch.float16,
                          Options(low_precision_states=False, gluon=False, fuse_bmm=False)),
    "one head": (Shape(1, 257, 1, 48, 1, 32, 256), LIMITED, torch.bfloat16, Options()),
    "wide heads and C B^T from memory": (Shape(1, 192, 26, 256, 2, 149, 64), replace(KEPT_STATES, D="h", z=False, packed=True),
                                         torch.bfloat16, Options(exp2=False, fuse_bmm=False)),
    **{f"a state a channel, {nheads} heads": (Shape(1, seqlen, nheads, 8, 1, 1, 64), Case(packed=True, D=D, dt_softplus=True),
                                              torch.float16, PLAIN_BACKWARD)
       for nheads, seqlen in ((5, 256), (3, 128), (1, 128)) for D in (None, "h")},
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("found", FOUND)
def test_what_a_search_found(found, name, device):
    shape, case, dtype, options = FOUND[found]
    assert_right(name, random_inputs(shape, case, dtype, device), options=options)


@pytest.mark.parametrize("name", OURS)
def test_a_document_for_each_token(name, device):
    """One channel: the gradient of a step is a sum over the state alone."""
    dtype = torch.bfloat16 if GPU else torch.float16
    shape = Shape(1, 128 if GPU else 40, 6, 1, 2, 100, 32)
    inputs = random_inputs(shape, Case(D="hp", z=True, state_dtype=torch.float32), dtype, device)
    tokens = torch.arange(shape.seqlen + 1, device=device, dtype=torch.int32)
    assert_right(name, replace(inputs, seq_idx=tokens[None, :-1].contiguous(), cu_seqlens=tokens))


@pytest.mark.gpu
@pytest.mark.parametrize("name", (*OURS, "torch"))
def test_one_document_of_one_token_compiled(name, device):
    """The state that is given reaches the document, as without torch.compile."""
    i = random_inputs(Shape(1, 1, 2, 64, 1, 64, 64), Case(initial_states=True), torch.float32, device)
    ends = torch.tensor([0, 1], device=device, dtype=torch.int32)

    def scan(initial_states):
        return ssd_chunk_scan(i.x, i.dt, i.A, i.B, i.C, 64, initial_states=initial_states, cu_seqlens=ends, variant=name)

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(scan)(i.initial_states), scan(i.initial_states))
