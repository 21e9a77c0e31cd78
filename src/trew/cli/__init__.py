"""The command line: one file per command. Heavy imports are inside functions, so that ``trew --help`` is fast."""
