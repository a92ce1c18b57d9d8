"""What mixes the tokens of a window in MambaVision (arXiv:2407.08083, section 3), and the same with SSD in the scan's place.

Half of the channels go through a state-space model, the other half pass it by; both are convolved before, symmetrically, for an
image has no direction. With Mamba-1's scan this is the published mixer. SSD decays by one number a head, where the scan has one
for each channel and state, so a model with it is another model, and results say which mixer they are of.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssd import Options, ssd_chunk_scan

from .mamba1 import choose_scan, draw_step_bias

_SSD_RATES = (1, 16)  # -A at the start, uniform between the two, as arXiv:2405.21060 draws it


class Branches(nn.Module):
    """(batch, seqlen, d_model) to the same shape: out_proj of what `ssm` makes of one half, and of the other half.

    Args:
        d_model: channels in and out, even.
        ssm: (batch, seqlen, d_model / 2) to the same shape.
    """

    def __init__(self, d_model: int, ssm: nn.Module):
        super().__init__()
        self.in_proj = nn.Linear(d_model, d_model, bias=False)
        # of both halves: a filter for each channel knows nothing of halves
        self.conv1d = nn.Conv1d(d_model, d_model, 3, padding=1, groups=d_model, bias=False)
        self.ssm = ssm
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        x, z = F.silu(self.conv1d(self.in_proj(u).mT)).mT.chunk(2, -1)  # each [batch, seqlen, d_model / 2]
        return self.out_proj(torch.cat([self.ssm(x), z], -1))


class Mamba1(nn.Module):
    """Mamba-1's selective scan with B, C and the step made of x (arXiv:2312.00752, section 3.2), without a gate.

    Args:
        channels: of x.
        dt_rank: numbers that the steps of all channels are made of.
        variant: see `mamba1.choose_scan`.
        d_state: states of a channel.
    """

    def __init__(self, channels: int, dt_rank: int, variant: str, d_state: int = 8):
        super().__init__()
        choose_scan(variant)  # refuses it before there is a model
        self.variant = variant
        self.parts = [dt_rank, d_state, d_state]
        self.x_proj = nn.Linear(channels, sum(self.parts), bias=False)
        self.dt_proj = nn.Linear(dt_rank, channels)
        nn.init.uniform_(self.dt_proj.weight, -(dt_rank**-0.5), dt_rank**-0.5)
        self.dt_proj.bias = nn.Parameter(draw_step_bias(channels))
        self.A_log = nn.Parameter(torch.arange(1.0, d_state + 1).log().repeat(channels, 1))
        self.D = nn.Parameter(torch.ones(channels))
        self.A_log._no_weight_decay = True  # nor does anything of one dimension decay

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seqlen, channels) to the same shape."""
        dt, B, C = self.x_proj(x).split(self.parts, -1)
        dt = F.linear(dt, self.dt_proj.weight)  # whose bias the scan adds, in fp32
        scan, A = choose_scan(self.variant), -self.A_log.float().exp()
        return scan(x.mT, dt.mT, A, B.mT, C.mT, self.D, delta_bias=self.dt_proj.bias).mT


class SSD(nn.Module):
    """Mamba-2's SSD with B, C and a step for each head made of x, without a gate.

    Args:
        channels: of x, a multiple of headdim.
        headdim: channels of a head.
        variant: see `ssd.ssd_chunk_scan`.
        d_state: states of a channel.
        chunk_size: tokens of a chunk.

    Raises:
        ValueError: channels that do not make whole heads.
    """

    def __init__(self, channels: int, headdim: int, variant: str, d_state: int = 16, chunk_size: int = 64):
        super().__init__()
        if channels % headdim:
            raise ValueError(f"headdim: got {headdim}, expected a divisor of the {channels} channels of SSD")
        heads = channels // headdim
        self.headdim, self.chunk_size, self.variant, self.options = headdim, chunk_size, variant, Options()
        self.parts = [heads, d_state, d_state]
        self.x_proj = nn.Linear(channels, sum(self.parts), bias=False)
        self.dt_bias = nn.Parameter(draw_step_bias(heads))
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(*_SSD_RATES).log())
        self.D = nn.Parameter(torch.ones(heads))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seqlen, channels) to the same shape."""
        x = x.contiguous()  # once for the projection and the scan: a convolution leaves tokens side by side, not channels
        dt, B, C = self.x_proj(x).split(self.parts, -1)
        y = ssd_chunk_scan(x.unflatten(-1, (-1, self.headdim)), dt, -self.A_log.float().exp(), B.unsqueeze(2), C.unsqueeze(2),
                           self.chunk_size, D=self.D, dt_bias=self.dt_bias, dt_softplus=True, variant=self.variant,
                           options=self.options)
        return y.flatten(2)
