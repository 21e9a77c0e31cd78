"""A run: its plan, its parts, the loop, its guards and its checkpoints."""
