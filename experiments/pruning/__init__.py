"""A trained workload without its least active states or heads: what that costs in loss, and gains in time and memory."""
