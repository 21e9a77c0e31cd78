"""Pools of worker processes for code that may hang, crash, exhaust memory or do harm: users' functions, symbolic
mathematics, graders from other packages, and the sandbox.

In this process: ``pool`` (creates workers and hands them out), ``worker`` (the lifetime of one process), ``tasks`` (a
pool whose work is stopped at limits on CPU time and memory). In the workers, which import nothing else from trew:
``boot``, ``frames``, ``tree``, ``guardian``, ``task_process``.
"""
