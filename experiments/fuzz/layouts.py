"""The same values in memory of another form: as users have them who slice, transpose and pack."""

import torch
from torch import Tensor

# offset: begins an odd number of elements into its memory; transposed: its first two axes lie the other way round; channels:
# the last two do; sliced: part of wider rows, of odd length; stepped: every second token, head or channel of twice as many
LAYOUTS = ("contiguous", "offset", "transposed", "channels", "sliced", "stepped")


def lay_out(t: Tensor, layout: str) -> Tensor:
    """The values of t in a layout of LAYOUTS.

    Raises:
        ValueError: no such layout.
    """
    if layout == "contiguous":
        return t.contiguous()
    if layout == "offset":
        return _into(torch.zeros(t.numel() + 3, dtype=t.dtype, device=t.device)[3:].view(t.shape), t)
    if layout in ("transposed", "channels"):
        if t.dim() < 2:
            return lay_out(t, "offset")
        axes = (0, 1) if layout == "transposed" and t.dim() == 2 else (1, 2) if layout == "transposed" else (-1, -2)
        return t.transpose(*axes).contiguous().transpose(*axes)
    if layout == "sliced":
        return _into(torch.zeros(*t.shape[:-1], t.shape[-1] + 5, dtype=t.dtype, device=t.device)[..., 1 : 1 + t.shape[-1]], t)
    if layout == "stepped":
        axis = min(1, t.dim() - 1)
        size = [*t.shape[:axis], 2 * t.shape[axis], *t.shape[axis + 1 :]]
        steps = (slice(None),) * axis + (slice(1, None, 2),)
        return _into(torch.zeros(size, dtype=t.dtype, device=t.device)[steps], t)
    raise ValueError(f"layout: got {layout!r}, expected one of {', '.join(LAYOUTS)}")


def pack(tensors: dict[str, Tensor], axis: int = 2) -> dict[str, Tensor]:
    """The tensors as slices of one projection: all are (batch, seqlen, ...), of one dtype, and so are their slices.

    axis: the first that belongs to the channels.
    """
    rows = torch.cat([t.flatten(axis) for t in tensors.values()], -1)
    slices = rows.split([t.shape[axis:].numel() for t in tensors.values()], -1)
    return {name: s.unflatten(-1, t.shape[axis:]) for (name, t), s in zip(tensors.items(), slices, strict=True)}


def _into(place: Tensor, t: Tensor) -> Tensor:
    return place.copy_(t)
