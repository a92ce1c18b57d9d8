"""Blocks of models, made of the operator and of the kernels around it."""

from .mamba2 import Mamba2, Mamba2Cache

__all__ = ["Mamba2", "Mamba2Cache"]
