"""Helpers that know nothing of training: the console, signals, TOML, secrets, memory."""
