"""Kernels whose programs live as long as their SM."""
