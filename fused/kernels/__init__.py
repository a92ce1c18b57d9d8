"""Kernels that merge stages, named after the stages or after what they compute; `hopper` has those for Hopper, in Gluon."""
