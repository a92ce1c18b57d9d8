"""The functions of mamba_ssm and causal_conv1d, by their names and with their signatures, over this repository's.

Other projects look at `inspect.signature` to learn what they may pass, so names, order and defaults are upstream's: those of
mamba_ssm 2.3, with `state_dtype` as its main branch has it, and of causal_conv1d 1.6.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..api import LARGEST_CHUNK, SMALLEST_CHUNK, ssd_chunk_scan, take_int
from ..block import conv1d
from ..block.conv1d_update import causal_conv1d_update
from ..block.mamba_inner import mamba_inner_fn
from ..block.selective_scan import selective_scan_fn
from ..block.split_conv1d_scan import split_conv1d_scan
from ..block.state_update import selective_state_update
from ..documents import check_bounds, number_documents
from ..runtime.tuning import next_power_of_2


def functions(settings: Callable[[], dict[str, object]]) -> dict[str, Callable]:
    """The seven functions by upstream's names. `settings` is asked at each call for the variant to run and its options."""

    def mamba_chunk_scan_combined(
        x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None,
        dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False, return_varlen_states=False,
        state_dtype=None,
    ):
        """`ssd.ssd_chunk_scan`, for any chunk_size: it does not change the result. Documents have no states of their own."""
        if cu_seqlens is not None and seq_idx is None and isinstance(x, Tensor) and x.dim() == 4:
            check_bounds(cu_seqlens, x, x.shape[1])
            seq_idx = number_documents(None, cu_seqlens, x.shape[1])
        return ssd_chunk_scan(
            x, dt, A, B, C, fit_chunk_size(chunk_size), D=D, z=z, dt_bias=dt_bias, initial_states=initial_states,
            seq_idx=seq_idx, cu_seqlens=cu_seqlens, dt_softplus=dt_softplus, dt_limit=dt_limit,
            return_final_states=return_final_states, return_varlen_states=return_varlen_states, state_dtype=state_dtype,
            **settings())

    def mamba_split_conv1d_scan_combined(
        zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states=None, seq_idx=None,
        dt_limit=(0.0, float("inf")), return_final_states=False, activation="silu", rmsnorm_weight=None, rmsnorm_eps=1e-6,
        outproj_weight=None, outproj_bias=None, headdim=None, ngroups=1, norm_before_gate=True, state_dtype=None,
    ):
        """`ssd.block.split_conv1d_scan.split_conv1d_scan`, for any chunk_size: it does not change the result."""
        return split_conv1d_scan(
            zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, fit_chunk_size(chunk_size), initial_states=initial_states,
            seq_idx=seq_idx, dt_limit=dt_limit, return_final_states=return_final_states, activation=activation,
            rmsnorm_weight=rmsnorm_weight, rmsnorm_eps=rmsnorm_eps, outproj_weight=outproj_weight,
            outproj_bias=outproj_bias, headdim=headdim, ngroups=ngroups, norm_before_gate=norm_before_gate,
            state_dtype=state_dtype, **settings())

    def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False,
                         final_states_out=None, activation=None):
        """`ssd.block.conv1d.causal_conv1d_fn`."""
        return conv1d.causal_conv1d_fn(x, weight, bias, seq_idx, initial_states, return_final_states, final_states_out,
                                       activation)

    placed = (mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined, causal_conv1d_fn, causal_conv1d_update,
              selective_state_update, selective_scan_fn, mamba_inner_fn)
    return {function.__name__: function for function in placed}


def fit_chunk_size(chunk_size: int) -> int:
    """The next chunk size that the kernels have, or their largest: models are configured with others, small ones in tests."""
    chunk_size = take_int("chunk_size", chunk_size)
    if chunk_size < 1:
        return chunk_size  # for `ssd_chunk_scan` to refuse
    return min(max(SMALLEST_CHUNK, next_power_of_2(chunk_size)), LARGEST_CHUNK)
