"""`trew study`: many runs by one design, paired by seed: tuning first, then the seeds that are reported."""
