"""Every kernel compiles for GPUs that are not here, fits their shared memory and their registers.

With the locked Triton all of this file but what is marked rare; with the oldest and the newest each kernel in one form for
Hopper, and for each other architecture with one of the two. With --triton, all of it, with the versions that it names as well.
"""

import atexit
import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

from ssd.registry import config_spaces
from tests.inputs import OURS
from tools import tritons

TOOL = Path(__file__).parents[2] / "tools" / "compile_kernels.py"
SHARED = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}  # bytes that one block may ask for

# Kernels that hold the state in registers beside the operands of five products: what they spill are addresses and masks that
# their loop only reads, and, in fp32 with a large dstate, operands.
WALKS = ("bmm_chunk_scan_kernel", "stationary_scan_kernel")
# Those that hold sums over the heads of a group there, in the same way.
GROUP_LOOPS = ("dC_dCB_kernel", "dB_dx_kernel")
# Bytes that a Triton spills of a kernel beyond what tests allow all, most of them in fp32. The ptxas of 3.9, and of plain
# kernels in 3.7, is CUDA 13's, and is given --regAllocOptLevel=2, without which hopper_group spills 56 in place of 216.
SPILLED = {"3.6": {"bmm_bwd_kernel": 248, "chunk_cumsum_bwd_kernel": 800, "dC_dCB_kernel": 384, "chunk_scan_dC_kernel": 8},
           "3.7": {"bmm_bwd_kernel": 64, "dB_dx_kernel": 40, "dC_dCB_kernel": 408, "chunk_scan_dC_kernel": 296,
                   "chunk_scan_chunk_state_dx_kernel": 224, "chunk_scan_dstates_kernel": 168, "chunk_state_dB_kernel": 160,
                   "ddA_cumsum_kernel": 136, "chunk_state_kernel": 24},
           "3.8": {"bmm_bwd_kernel": 32, "dC_dCB_kernel": 400, "chunk_scan_dC_kernel": 24},
           "3.9": {"hopper_group_kernel": 216, "hopper_scan_kernel": 88, "hopper_wide_scan_kernel": 120, "bmm_bwd_kernel": 72,
                   "dB_dx_kernel": 80, "dC_dCB_kernel": 520, "chunk_scan_dC_kernel": 72}}
# Variants, and the optimisations without which other kernels of theirs run. What runs with Gluon has tests of its own.
PLAIN = [(name, "--off", "gluon") for name in OURS]
WAYS = [*PLAIN, ("fused", "--off", "gluon,two_level"), ("persistent", "--off", "gluon,stationary")]

GLUON = [("fused",), ("persistent",)]  # on Hopper
HOPPER = ("hopper_states_kernel", "hopper_scan_kernel", "hopper_group_kernel")
PIECES = "hopper_pieces_kernel"  # where sequences are cut
MOST_GROUPS = 12  # of wgmma that are waited for together, in one of these; where ptxas serialises them, as many as instructions

PRODUCTS = "--only scan,state,dC_dCB,dB_dx"  # kernels that a fault of ptxas may reach

# Those that have kernels in common together: two workers would compile these twice.
over_ways = pytest.mark.parametrize("ways", (WAYS[:1], WAYS[1:]), ids=("baseline", "others"))


def param(*values: object, rare: bool = False, **given: object):
    """As pytest.param, with the mark of what is rare."""
    return pytest.param(*values, marks=pytest.mark.rare if rare else (), **given)


mostly_others = pytest.mark.parametrize("ways", (param(WAYS[:1], rare=True, id="baseline"), param(WAYS[1:], id="others")))


@cache
def compiler(version: str | None) -> subprocess.Popen[str]:
    """A process that compiles, for this one may interpret kernels; one for all tests, since it takes seconds to start."""
    process = subprocess.Popen([sys.executable, str(TOOL), "--serve", *(["--triton", version] if version else [])],
                               env=tritons.make_environment(version), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(process.kill)
    return process


@cache
def _compile(version: str | None, *arguments: str) -> list[dict]:
    process = compiler(version)
    process.stdin.write(json.dumps(arguments) + "\n")
    process.stdin.flush()
    answer = json.loads(process.stdout.readline())
    assert isinstance(answer, list), answer
    return answer


@pytest.fixture
def compiled(triton, request) -> Callable[..., list[dict]]:
    if request.node.get_closest_marker("rare") and not request.config.option.triton:
        pytest.skip("not needed every time: make test TRITON=all compiles it")
    return partial(_compile, triton, "--variant")


def allow_spills(row: dict) -> int:
    return SPILLED.get(row["triton"].rpartition(".")[0], {}).get(row["kernel"], 0)


def assert_fits(rows: list[dict], arch: int, spills: int, by_walks: int) -> None:
    for row in rows:
        assert row["shared"] <= SHARED[arch], f"{row}: a block on sm_{arch} has {SHARED[arch]} bytes of shared memory"
        most = by_walks if row["kernel"] in (*WALKS, *GROUP_LOOPS) else spills
        most = max(most, allow_spills(row))
        assert not row["apart"], f"{row}: which of several lanes' sums is stored is left to chance"
        assert not row["unfenced"], f"{row}: products may read what the tiles held before"
        assert not row["lost"], f"{row}: the next turn of its loop reads what this one has overwritten"
        assert not row["foreign"], f"{row}: an address of a product is made of what something else has written, or nothing"
        assert row["registers"] <= 255 and row["spills"] <= most, f"{row}: at most {most} bytes may be spilled"


@pytest.mark.other_tritons
def test_every_kernel_with_other_tritons(triton, compiled, request):
    """The oldest and the newest that the package takes, whatever --triton says: each kernel once, as models use it most, or
    baseline's with every option.
    """
    for arch in SHARED if request.config.option.triton else tritons.CHIPS[triton]:
        baseline, fused, persistent, by_rows, _ = WAYS
        ways = [(*baseline, "--every-option"), (*baseline, "--part"), fused, (*persistent, "--only", "stationary"),
                (*by_rows, "--only", "rows"), *(GLUON if arch == 90 else ())]
        rows = [row for way in ways for row in compiled(*way, "--arch", str(arch), "--once")]
        assert {row["triton"] for row in rows} == {triton}
        assert_fits(rows, arch, spills=64, by_walks=1152)
        kernels = {row["kernel"] for row in rows}
        assert kernels >= {f"{kernel}_kernel" for kernel in config_spaces()}
        assert len({row["kernel"] for row in rows if row["dots"]}) >= 15
        for row in rows if arch == 90 else ():
            assert bool(row["wgmma"]) == bool(row["dots"] or row["kernel"] in (*HOPPER, PIECES)) and not row["mma"], row
            assert row["kernel"] not in (*HOPPER, PIECES) or row["groups"] <= MOST_GROUPS, row
            assert not row["late"], row
        assert arch != 90 or kernels >= set(HOPPER)


@pytest.mark.parametrize("arch, given", (param(90, "--documents"), param(120, ""), param(80, "", rare=True),
                                         param(100, "--documents", rare=True)))
def test_part_of_a_sequence(arch, given, compiled):
    rows = compiled("baseline", "--part", "--only", "part_", "--arch", str(arch), *given.split())
    assert [row["kernel"] for row in rows] == ["part_sum_kernel"] * 2 + ["part_total_kernel"] * 2  # forwards and backwards
    assert_fits(rows, arch, spills=64, by_walks=0)
    assert arch != 90 or all(bool(row["wgmma"]) == bool(row["dots"]) for row in rows)


def test_states_of_few_heads(compiled):
    """By chunks of a kernel's own sub-chunks, where walks are not worth it."""
    rows = compiled("fused", "--off", "gluon", "--arch", "90", "--nheads", "2", "--seqlen", "16384", "--only", "state")
    assert_fits(rows, 90, spills=64, by_walks=1152)
    kernels = {row["kernel"] for row in rows}
    assert {"chunk_state_kernel", "state_passing_kernel", "state_passing_bwd_kernel"} <= kernels
    assert "dstates_passing_kernel" not in kernels


FUSED = "fused --off gluon --arch 90"
FITS = [  # what is compiled, architecture, bytes that may be spilled, and by walks
    # the largest tiles in bytes, on the chip with the least room for them as well
    *(param(f"{variant} --off gluon --arch {arch} --dtype fp32 {sizes}", arch, spills, by_walks, rare=arch == 120,
            id=f"{variant}, fp32, sm_{arch}")
      for arch, sizes, spills, by_walks in ((90, "--headdim 64 --dstate 128", 0, 256),
                                            (120, "--headdim 256 --dstate 256", 1024, 7168)) for variant in OURS),
    # two heads to a group, and D: what ptxas took for an address at 16 channels and 16 states came with these
    *(param(f"{FUSED} --headdim {headdim} --dstate {dstate} --nheads 2 --chunk-size 64 --seqlen 4096 --every-option {PRODUCTS}",
            90, 64, 1152, rare=(headdim, dstate) != (16, 16), id=f"narrow tiles, {headdim} x {dstate}")
      for headdim in (16, 32) for dstate in (16, 64)),
    # sizes at which ptxas 12.8, or any up to 13.0, was found to make products of the wrong operands: it is not launched
    param(f"{FUSED} --headdim 48 --dstate 32 --nheads 3 --ngroups 3 --seqlen 257 --C-dtype fp16 {PRODUCTS}",
          90, 64, 1152, id="one head a group"),
    param(f"{FUSED} --headdim 8 --dstate 1 --nheads 5 --chunk-size 64 --seqlen 256 --dtype fp16 {PRODUCTS}",
          90, 64, 1152, id="one state"),
    param(f"{FUSED} --headdim 256 --dstate 64 --nheads 6 --chunk-size 128 --seqlen 64 --every-option {PRODUCTS}",
          90, 64, 1152, id="wide heads"),
]


@mostly_others
def test_every_option(ways, compiled):
    """Baseline's are among what the oldest and the newest Triton compile."""
    assert_fits([row for way in ways for row in compiled(*way, "--arch", "90", "--every-option")], 90, spills=64, by_walks=1152)


@pytest.mark.parametrize(("arguments", "arch", "spills", "by_walks"), FITS)
def test_what_fits(arguments, arch, spills, by_walks, compiled):
    assert_fits(compiled(*arguments.split()), arch, spills, by_walks)


def test_documents_on_hopper(compiled):
    """Which the Gluon kernels keep apart by decay: chunk_cumsum reads where they begin, and nothing else does."""
    rows = {row["kernel"]: row for row in compiled("persistent", "--arch", "90", "--documents")}
    plain = {row["kernel"]: row for row in compiled("persistent", "--arch", "90")}
    assert rows.keys() == plain.keys() and "hopper_scan_kernel" in rows
    assert [name for name in rows if rows[name] != plain[name]] == ["chunk_cumsum_kernel"]
    assert_fits(list(rows.values()), 90, spills=64, by_walks=1152)


@over_ways
def test_one_token_of_one_head(ways, compiled):
    """Triton takes sizes of 1 for constants, which have no methods."""
    small = ("--headdim", "16", "--dstate", "16", "--chunk-size", "16")
    for way in ways:
        assert compiled(*way, *small, "--arch", "90", "--seqlen", "1", "--nheads", "1", "--every-option")


@pytest.mark.rare
@over_ways
def test_without_wgmma(ways, compiled):
    """What a kernel in which a fault is found is compiled to: it fits as well, and has its products all the same."""
    rows = [row for way in ways for row in compiled(*way, "--arch", "90", "--distrust")]
    assert_fits(rows, 90, spills=1024, by_walks=4096)
    assert not any(row["wgmma"] for row in rows)
    assert all(row["mma"] for row in rows if row["dots"])


@mostly_others
@pytest.mark.parametrize("configs", ("1", param("2", rare=True)))
def test_configs_on_hopper(configs, ways, compiled):
    """Of those that a tuner may try, some: a GPU's tests run all. Matrix products use the warpgroup instruction."""
    rows = [row for way in ways for row in compiled(*way, "--configs", configs)]
    assert_fits(rows, 90, spills=256, by_walks=320)
    for row in rows:
        assert not row["dots"] or row["wgmma"], f"{row}: its products do not use wgmma"


def test_backward_in_group_loops(compiled):
    """On Hopper in bf16, at the sizes that models have: next to nothing is spilled, and no product is without warpgroups."""
    many = ("--seqlen", "4096", "--nheads", "128", "--ngroups", "8")  # heads, so that there is a loop over them
    rows = compiled("fused", "--off", "gluon", "--arch", "90", *many, "--only", "dstates_passing,dC_dCB,dB_dx")
    assert {row["kernel"] for row in rows} == {"dstates_passing_kernel", *GROUP_LOOPS}
    for row in rows:
        assert row["wgmma"] and not row["mma"] and not row["unfenced"] and row["spills"] <= max(32, allow_spills(row)), row


@pytest.mark.parametrize("sizes", [("128", "64"), ("256", "256")], ids="x".join)
def test_products_keep_their_operands(sizes, compiled):
    """Heads too wide for one tile: a loop over their channels reads the same weights each turn."""
    options = ("--off", "gluon", "--arch", "90", "--headdim", sizes[0], "--dstate", sizes[1], "--ngroups", "8")
    (row,) = compiled("fused", *options, "--only", "dB_dx")
    assert row["lost"] == [] and row["wgmma"]


# What is compiled, and the bytes that the scan and the pass over states may spill: addresses of states that enter or leave,
# once for each run. Sequences of 4096 tokens are long enough to be cut.
LONG = {"64": 32, "64 --dtype fp16": 32, "128": 32, "128 --initial-states --state-dtype fp32": 208}
GLUON_FORMS = {
    **{f"{variant} --seqlen 4096 --dstate {dstate}": (spills, spills) for variant in ("fused", "persistent")
       for dstate, spills in LONG.items()},
    "persistent --nheads 25 --headdim 48": (104, 32),
    "fused --dstate 64 --z": (104, 32),
    "persistent --seqlen 4096 --asked 1024 --off save_states": (104, 32),
}


# The sizes, and bytes that the wide scan may spill: addresses and masks of states that enter or leave a run, and where a gate,
# kept outputs and tiles that heads do not fill meet, a few in its loop.
WIDE_FORMS = {
    "persistent --seqlen 4096 --headdim 128 --dstate 256": 48,
    "persistent --seqlen 4096 --headdim 64 --dstate 256": 48,
    "persistent --seqlen 4096 --headdim 128 --dstate 256 --off save_states": 48,
    "persistent --headdim 128 --dstate 256 --dtype fp16": 48,
    "persistent --headdim 64 --dstate 256 --initial-states --off save_states": 80,
    "persistent --headdim 80 --dstate 192 --nheads 25 --z --initial-states": 152,
    "fused --headdim 128 --dstate 256": 48,
}


@pytest.mark.parametrize("arguments", [param(form, rare="4096" not in form) for form in WIDE_FORMS])
def test_wide_gluon_kernels(arguments, compiled):
    """Products run in as many groups as the design has: of each slice four quarters and the last two; one of the masks."""
    rows = compiled(*arguments.split(), "--arch", "90", "--only", "hopper")
    spills = {"hopper_wide_scan_kernel": WIDE_FORMS[arguments], "hopper_states_kernel": 32, "hopper_ends_kernel": 112,
              "hopper_pairs_kernel": 240}
    groups = {"hopper_pairs_kernel": 48}  # each of its products by itself, of four instructions
    if "4096" in arguments:
        spills[PIECES] = 0
    assert {row["kernel"] for row in rows} == set(spills)
    assert_fits(rows, 90, spills=240, by_walks=0)
    for row in rows:
        assert row["spills"] <= max(spills[row["kernel"]], allow_spills(row)), row
        assert not row["mma"] and row["wgmma"] and not row["late"] and not row["foreign"], row
        most = groups.get(row["kernel"], 13)
        assert row["groups"] <= most, f"{row}: ptxas serialised its products, for want of registers or by C7514"


@pytest.mark.parametrize("arguments", [param(form, rare="fp16" in form) for form in GLUON_FORMS])
def test_gluon_kernels(arguments, compiled):
    """Four warpgroups at 128 registers a thread fill the register file, three at 160 nearly. The group spills addresses of
    shared memory.
    """
    rows = compiled(*arguments.split(), "--arch", "90", "--only", "hopper,bmm_chunk_scan,stationary_scan")
    assert {row["kernel"] for row in rows} == {*HOPPER, *([PIECES] if "4096" in arguments else ())}
    assert_fits(rows, 90, spills=256, by_walks=0)
    spills = dict(zip(("hopper_scan_kernel", "hopper_states_kernel"), GLUON_FORMS[arguments], strict=True)) | {PIECES: 0}
    for row in rows:
        assert row["spills"] <= max(spills.get(row["kernel"], 256), allow_spills(row)), row
        most = 160 if row["kernel"] in ("hopper_states_kernel", PIECES) else 128
        assert row["registers"] <= most and not row["mma"] and row["wgmma"]
        assert not row["late"], f"{row['kernel']}: {row['late']}"
        assert row["groups"] <= MOST_GROUPS, f"{row}: ptxas serialised its products, for want of registers or by C7514"


@pytest.mark.parametrize("sizes", ["--dstate 128", param("--headdim 80 --dstate 256 --z", rare=True)])
def test_documents_with_states_on_hopper(sizes, compiled):
    """As they are."""
    form = f"persistent --document-states --seqlen 4096 {sizes}"
    rows = compiled(*form.split(), "--off", "save_states", "--arch", "90", "--only", "hopper,chunk_cumsum,document_blocks")
    kernels = {row["kernel"] for row in rows}
    assert kernels == {*HOPPER, PIECES, "document_blocks_kernel", "chunk_cumsum_kernel", "chunk_cumsum_bwd_kernel"}
    assert_fits(rows, 90, spills=320, by_walks=0)
    for row in rows:
        assert not row["late"] and (row["groups"] or 0) <= MOST_GROUPS, row
        assert row["kernel"] in ("hopper_scan_kernel", "hopper_group_kernel") or row["spills"] <= 40, row


@pytest.mark.parametrize("sizes", ["--dstate 128", param("--headdim 128 --dstate 64", rare=True)])
def test_deferred_norms_on_hopper(sizes, compiled):
    """A scan that gates, weighs and sums squares."""
    (row,) = compiled("persistent", "--deferred-norm", "--z", *sizes.split(), "--arch", "90", "--only", "hopper_scan")
    assert_fits([row], 90, spills=64, by_walks=0)
    assert row["wgmma"] and not row["mma"] and not row["late"] and row["groups"] <= MOST_GROUPS
