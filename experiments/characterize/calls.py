"""What one call does, launch by launch, as far as `projection` needs it for a time; counted, so that nothing here is fitted.

Plain kernels, of baseline and mamba_ssm: bytes and exponentials by the cost model. Each exponential of a pair of tokens goes
with 4 bytes of CB that come from L2, once for each tile of 64 channels; mamba_ssm's tiles are as wide as a head. In mamba_ssm
B or C come from L2 for each head as well, in chunk_state and chunk_scan, and in the backward in five launches. It computes
the last chunk as if it were whole: all rows of it forwards, all pairs of tokens backwards. Its backward reads x and the
gradient of y from L2 for each pair of tiles of a chunk too, in two launches each, and leaves sums and zeros to torch. The
recurrence between chunks takes them one after the other.

Kernels on Hopper, of fused and persistent: bytes from their tensors, and steps of the thread block that does most, from the
very tables by which the launchers deal sequences out. A step is 64 tokens of two slices of 64 channels, or of one slice for
hopper_group; in the backward of a dstate above 128 it is a span of 128 tokens. Warps of their own fetch what these kernels
read; what they write is written by those that work.
"""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch

from fused import schedule
from fused.hopper import BLOCK_M, SLICE, count_pairs, count_parts
from fused.time_model import get_time_model
from ssd import cost
from ssd.kernels.arguments import cdiv
from ssd.types import SPAN

from .gpus import GPUS

PLAIN, HOPPER = ("baseline", "mamba_ssm"), ("fused", "persistent")
MODES = ("fwd", "fwd_train", "bwd")
_KEPT_LAUNCHES = 14  # of the baseline's backward after a forward that kept its states, at most
_WIDE_STEP = 1.7  # a step of hopper_wide_scan, in steps of hopper_scan (docs/log/hopper-breadth.md)
_ENDS_SLICE, _PAIRS_SLICE = 1.4, 1.6  # a slice of hopper_ends and of hopper_pairs, in slices of hopper_group (likewise)
_CB_ITEMSIZE = 4
_READ_FOR_EACH_HEAD = {"fwd": 2, "fwd_train": 2, "bwd": 5}  # launches of mamba_ssm 2.3.2 that read B or C so
_READ_FOR_EACH_PAIR = 4  # tensors as large as x, by launches of its backward
OWN_LAUNCHES = 14  # of its backward without a gate, which has one more; torch has the others
TORCH = "launch of torch"  # not among the launches of a sample


class Part(NamedTuple):
    """One launch, or several that are alike.

    Attributes:
        work: {constant: how often}, for the constants of `projection.CONSTANTS`; L2 in MB.
        exposed: bytes of memory that are waited for beside the work.
        hidden: bytes that warps of their own fetch, while others work.
    """

    work: dict[str, float]
    exposed: float = 0.0
    hidden: float = 0.0


def count_plain(variant: str, mode: str, p: cost.Problem, launches: int) -> list[Part]:
    """A call of `baseline` or `mamba_ssm`. launches: tells whether the backward computes states again, and what torch has."""
    keeps = variant == "baseline" and launches <= _KEPT_LAUNCHES
    whole = cost.total(cost.count_backward_stages(p, keeps) if mode == "bwd" else cost.count_forward_stages(p))
    tiles = cdiv(p.headdim, SLICE) if variant == "baseline" else 1
    walks = 2 if mode == "bwd" else 1
    from_l2, of_torch = _CB_ITEMSIZE * tiles * whole.exps, {}
    if variant == "mamba_ssm":
        if mode == "bwd":
            p = replace(p, seqlen=p.nchunks * p.chunk_size)
            from_l2 = _CB_ITEMSIZE * cost.total(cost.count_backward_stages(p, False)).exps
            from_l2 += _READ_FOR_EACH_PAIR * p.itemsize * p.X * (max(p.chunk_size // SLICE, 1) + 1) / 2
            of_torch = {TORCH: launches - OWN_LAUNCHES - p.gated}
        else:
            from_l2 *= p.nchunks * p.chunk_size / p.seqlen  # rows past seqlen too
        from_l2 += _READ_FOR_EACH_HEAD[mode] * p.itemsize * p.D * p.dstate
    return [Part({f"L2 of {variant}": from_l2 / 1e6, f"chunk of {variant}": walks * p.nchunks, **of_torch}, whole.bytes)]


@cache
def count_hopper(variant: str, mode: str, p: cost.Problem, gpu: str) -> list[Part]:
    """A call of `fused` or `persistent` by the Gluon kernels, a part for each launch; they heed no chunk size.

    gpu: a key of GPUS, by whose SMs and time model sequences are cut.
    """
    model, sms = get_time_model(gpu), int(GPUS[gpu].sms.value)
    nsub, pairs, parts = cdiv(p.seqlen, BLOCK_M), count_pairs(p), count_parts(p.dstate)
    x, groups, steps = p.itemsize * p.X, p.itemsize * p.K, 8 * p.D  # bytes; steps: dt and dA_cumsum
    states, inputs, gate = p.itemsize * nsub * p.state, x + groups + steps, x * p.gated
    prepared = [Part({}, (p.itemsize + 8) * p.D)]
    if mode == "bwd":
        if p.gated:
            prepared.append(Part({}, cost.count_backward_stages(p)["chunk_scan_dz"].bytes))
        after = [Part({}, (2 * p.itemsize + 20) * p.D)]
        if parts == 2:
            return [*prepared, *_count_spans(p, pairs * parts, x, groups, steps, gpu), *after]
        tiles, heads = p.batch * nsub * p.ngroups, p.nheads // p.ngroups
        splits = schedule.choose_splits(tiles, heads, sms, gpu)
        slices = cdiv(tiles * splits, sms) * (cdiv(heads, splits) + model.group_tile) * cdiv(p.headdim, SLICE)
        sums = 8 * splits * p.K if splits > 1 else 0  # of dB and dC in fp32
        group = Part({"group": slices}, x + steps + 2 * groups + sums, 2 * x + steps + 2 * (groups + states))
        walks = _walk(p, pairs, "every_state_step", "states", inputs, states, gpu)
        return [*prepared, *walks, group, *after, *[Part({}, sums / 2)] * (2 * (splits > 1))]
    kept = states / parts if mode == "fwd_train" else 0  # above 128 states of each span
    step = _WIDE_STEP if parts == 2 else 1.0
    if variant == "persistent":
        walk = "kept_scan_step" if kept else "scan_step"
        return [*prepared, *_walk(p, pairs, walk, "scan", inputs + groups + gate, kept + x, gpu, step)]
    segment = schedule.choose_two_level_segment(p.batch * pairs, nsub, sms, gpu)
    walked = model.time_two_level(p.batch * pairs, nsub, sms, segment)
    scan = Part({"scan": step * walked}, x, inputs + groups + gate + states / segment)
    walk = "every_state_step" if kept else "few_states_step"
    return [*prepared, *_walk(p, pairs * parts, walk, "states", inputs, kept or states / segment, gpu), scan]


def _count_spans(p: cost.Problem, walks: int, x: float, groups: float, steps: float, gpu: str) -> list[Part]:
    """The backward of a dstate above 128, without its first and last launch. walks: of a row; x, groups, steps: bytes."""
    nspans, heads, sms = cdiv(p.seqlen, SPAN), p.nheads // p.ngroups, int(GPUS[gpu].sms.value)
    states, tiles = p.itemsize * nspans * p.state, p.batch * nspans * p.ngroups
    of_ends, of_pairs = (schedule.choose_splits(n * tiles, heads, sms, gpu) for n in (2, 1))
    ends, pairs = (cdiv(tiles * n * splits, sms) * cdiv(heads, splits) * cdiv(p.headdim, SLICE)
                   for n, splits in ((2, of_ends), (1, of_pairs)))
    sums = 8 * p.K  # of a part of dB and dC in fp32
    return [*_walk(p, walks, "every_state_step", "states", x + groups + steps, states, gpu, tokens=SPAN),
            Part({"group": _ENDS_SLICE * ends}, x + steps + of_ends * sums, 2 * (x + groups + states)),
            Part({"group": _PAIRS_SLICE * pairs}, x + steps + of_pairs * sums, 3 * x + steps + sums + 2 * groups),
            *[Part({}, (of_ends + of_pairs - 1) * sums / 2 + groups)] * (2 * (of_ends + of_pairs > 2))]


def _walk(p: cost.Problem, pairs: int, step: str, constant: str, fetched: float, written: float, gpu: str,
          longer: float = 1.0, tokens: int = BLOCK_M) -> list[Part]:
    """A launch that walks every sequence; and before it one of the pieces of sequences that are cut.

    fetched, written: bytes. longer: the time of a step in that of the constant's; tokens: of a step.
    """
    nsub = cdiv(p.seqlen, tokens)
    runs = schedule.deal(p.batch, pairs, nsub, int(GPUS[gpu].sms.value), gpu, step, True, 1, torch.device("cpu"))
    walks = [Part({constant: longer * _count_steps(runs.sequences, gpu)}, written, fetched)]
    if runs.pieces is None:
        return walks
    walked = float((runs.pieces[..., 3] - runs.pieces[..., 2]).sum()) / (p.batch * pairs * nsub)
    return [Part({"states": _count_steps(runs.pieces, gpu)}, hidden=walked * p.itemsize * (p.X + p.K)), *walks]


def _count_steps(runs: torch.Tensor, gpu: str) -> float:
    """Of the thread block that has most, its starts among them: before its first run, and where a state is waited for. Else the
    next run's tiles come while one is walked. runs: (blocks, nruns, RUN_FIELDS).
    """
    steps, waits = runs[..., 3] - runs[..., 2], runs[..., 5] > 0
    waits[:, 0] = True
    return float((steps + get_time_model(gpu).two_level_start * waits).sum(1).max())
