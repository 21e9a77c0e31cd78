"""Trains reward models on preference pairs: Bradley-Terry loss, pair data, and agreement metrics."""

from .loss import bradley_terry
from .pairs import Pair, pairs_of_groups, read_pairs, write_pairs
from .settings import RewardTraining, load_settings
from .train import train_reward

__all__ = [
    "Pair",
    "RewardTraining",
    "bradley_terry",
    "load_settings",
    "pairs_of_groups",
    "read_pairs",
    "train_reward",
    "write_pairs",
]
