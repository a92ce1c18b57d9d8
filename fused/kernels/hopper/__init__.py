"""Kernels for Hopper, in Gluon, with a role for each warpgroup."""
