"""Kernels whose programs walk a sequence, or a long part of it."""
