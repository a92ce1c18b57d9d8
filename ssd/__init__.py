"""Mamba-2's SSD operator: one function, several implementations of it."""

from .api import ssd_chunk_scan
from .registry import get_variant, variant_names
from .types import Options

__all__ = ["Options", "get_variant", "ssd_chunk_scan", "variant_names"]
