"""Where the time goes, and why: operators, counters, classes of kernels, projections, and the report of them all."""
