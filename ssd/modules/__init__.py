"""Blocks of models, made of the operator and of the kernels around it, and a language model of them."""

from .captured import Mamba2LMCache
from .language_config import Mamba2LMConfig
from .language_model import Mamba2LM
from .mamba2 import Mamba2, Mamba2Cache

__all__ = ["Mamba2", "Mamba2Cache", "Mamba2LM", "Mamba2LMCache", "Mamba2LMConfig"]
