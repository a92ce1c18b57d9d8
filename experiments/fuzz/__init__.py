"""A random differential test: configurations drawn at random, run on the variants' kernels and judged against fp64.

`operator`, `block` and `serving` say what can be drawn and how it is computed, `trial` runs one configuration, `pool` runs
many in processes of their own, `shrink` makes a failing one small, and `campaign` is a whole run.
"""
