"""The sandbox for untrusted Python programs: which boundary this machine has, and programs run behind it."""

from .choose import INSTALL, Boundary, boundary, describe
from .pool import Job, JobLimits, JobOutcome, close_pools, pool

__all__ = ["INSTALL", "Boundary", "Job", "JobLimits", "JobOutcome", "boundary", "close_pools", "describe", "pool"]
