"""Rollouts from vLLM servers: processes with weights of their own, which :mod:`trew.weights` brings up to date."""
