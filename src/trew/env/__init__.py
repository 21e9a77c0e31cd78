"""Environments: episodes of several turns between a policy and Python code, with tools."""

from .protocol import Call, Environment, Episode, Observation, Reply, Say, Tool

__all__ = ["Call", "Environment", "Episode", "Observation", "Reply", "Say", "Tool"]
