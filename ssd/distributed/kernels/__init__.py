"""The kernel of a sequence over several GPUs."""
