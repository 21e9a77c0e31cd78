"""One pool of worker processes, for everything that may hang, crash, eat memory or do harm: users' functions, symbolic
mathematics, graders of other packages, and the sandbox.

In this process: ``pool`` (how many workers there are, who has which), ``worker`` (one process, from its start to its
end), ``tasks`` (a pool for work that is stopped at limits on CPU time and memory). In the workers, where nothing of
trew is imported: ``boot``, ``frames``, ``tree``, ``guardian``, ``task_process``.
"""
