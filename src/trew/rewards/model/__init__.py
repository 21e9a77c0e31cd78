"""Reward models: a transformer with one number for a label scores completions, whole or step by step."""
