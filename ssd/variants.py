"""The table of variants. No other module of `ssd` names what is built on it; a new variant adds one line here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """Where a variant is.

    Attributes:
        module: has the `registry.Variant` as VARIANT; imported when the variant is first asked for.
        options: the file that declares the variant's own switches, beside the folder `ssd`. It has OPTIONS, which maps a name
            in `Options` to what the switch does. Read with `ssd`, by its path: a user's module may have the package's name.
        auto: whether "auto" may choose the variant on a GPU.
        peer: whether it is another project's implementation, differentiable by itself.
    """

    module: str
    options: str | None = None
    auto: bool = False
    peer: bool = False


# "auto" tries the last first where it knows no better.
VARIANTS = {
    "baseline": Entry("ssd.baseline.variant", auto=True),
    "fused": Entry("fused.variant", options="fused/options.py", auto=True),
    "persistent": Entry("persistent.variant", options="persistent/options.py", auto=True),
    "torch": Entry("ssd.torch_variant"),
    "mamba_ssm": Entry("ssd.interop.mamba_ssm", peer=True),
    "fla": Entry("ssd.interop.fla", peer=True),
}
