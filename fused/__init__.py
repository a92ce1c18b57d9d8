"""Kernels that merge stages of the operator: the forward in three launches."""
