"""trew inside other trainers: each package imports its peer lazily, on first use."""
