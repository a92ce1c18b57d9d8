"""Kernels whose thread blocks live long: over a whole sequence with its state in registers, or over many tiles."""
