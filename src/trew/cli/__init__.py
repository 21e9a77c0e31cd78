"""The command line: one file per command; heavy imports are inside functions, so that ``trew --help`` stays quick."""
