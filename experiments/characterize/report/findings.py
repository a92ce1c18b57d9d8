"""What the report found, a sentence and a number each, before the tables that they come from."""

from __future__ import annotations

from pathlib import Path

from ..definitions import Call
from . import bandwidth, steps
from .parts import NOT_YET, Section

_UPSTREAM, _BASELINE, _FUSED, _PERSISTENT = "mamba_ssm", "baseline", "fused", "persistent"


def section(calls: list[Call], out: Path) -> Section:
    """Five paragraphs; each says so where rows are missing."""
    forward = {call.row["variant"]: call for call in calls if call.row["mode"] == "fwd"}
    found = (_used_bandwidth(forward), _moved_bytes(forward), _lived_longer(forward), _busy_units(forward), _steps(out))
    return Section("Five findings", tuple(f"**{n}.** {text}" for n, text in enumerate(found, 1)))


def _used_bandwidth(forward: dict[str, Call]) -> str:
    shown = {name: bandwidth.main_peak(forward[name]) for name in (_UPSTREAM, _PERSISTENT) if name in forward}
    if len(shown) < 2:
        return f"The bandwidth that the forward uses beside the paper's {bandwidth.PAPER_PERCENT} %: {NOT_YET}."
    (peak, theirs), (_, ours) = shown.values()
    return (f"**Bandwidth.** The paper finds that SSM kernels use {bandwidth.PAPER_PERCENT} % of the memory's bandwidth. "
            f"Weighted with time, mamba_ssm's forward uses {theirs.W:.0f} % of {peak} here, `{_PERSISTENT}`'s {ours.W:.0f} %.")


def _moved_bytes(forward: dict[str, Call]) -> str:
    moved = {name: forward[name].dram_bytes / 1e6 for name in (_BASELINE, _FUSED, _PERSISTENT) if name in forward}
    if len(moved) < 3:
        return f"The bytes that fusion saves: {NOT_YET}."
    saved = moved[_BASELINE] / moved[_PERSISTENT]
    return (f"**Bytes.** Fusion gains most by moving less: the forward of `{_PERSISTENT}` moves {saved:.1f} times fewer bytes "
            f"than the baseline's ({moved[_BASELINE]:,.0f} MB; `{_FUSED}` {moved[_FUSED]:,.0f} MB; "
            f"`{_PERSISTENT}` {moved[_PERSISTENT]:,.0f} MB).")


def _lived_longer(forward: dict[str, Call]) -> str:
    lives = [forward[name].row.get("block_cycles") for name in (_BASELINE, _PERSISTENT) if name in forward]
    if len(lives) < 2 or None in lives:
        return f"How much longer persistent thread blocks live: {NOT_YET}."
    before, after = (bandwidth.main_peak(forward[name])[1].W for name in (_BASELINE, _PERSISTENT))
    change = "raise" if after > before else "do not raise"
    return (f"**Block lifetime.** Persistent thread blocks live {lives[1] / lives[0]:.0f} times as long as the baseline's and "
            f"{change} the bandwidth: from {before:.0f} to {after:.0f} %, weighted with time.")


def _busy_units(forward: dict[str, Call]) -> str:
    use = bandwidth.units_in_use(forward[_PERSISTENT]) if _PERSISTENT in forward else {}
    if not use:
        return f"What binds `{_PERSISTENT}`: {NOT_YET}."
    unit = max(use, key=use.get)
    bound = "That unit is near its limit." if use[unit] > bandwidth.BUSY else "So no unit alone is the bound."
    return f"**What binds then.** The busiest unit in the forward of `{_PERSISTENT}` is {unit}, at {use[unit]:.0f} %. {bound}"


def _steps(out: Path) -> str:
    shares = steps.latest(out)
    pairs = [(values["ssm"], shares[other]["ssm"], name) for name, values in shares.items() if f" {_UPSTREAM}," in name
             and (other := name.replace(f" {_UPSTREAM},", f" {_PERSISTENT},")) in shares]
    if not pairs:
        return f"The part of a training step that SSM kernels take: {NOT_YET}."
    theirs, ours, name = max(pairs)
    return (f"**Training steps.** SSM kernels take at most {theirs:.0f} % of a step with mamba_ssm inside "
            f"({name.partition(f' {_UPSTREAM},')[0]}), and {ours:.0f} % of the same with `{_PERSISTENT}`.")
