"""Finds the backend of a run by name: an installation without the folder ``backends`` has none."""

from __future__ import annotations

import importlib

import torch

from ..config import Config
from .backend import Backend

ROOM = "trew.backends"
BY_DEVICE = {"cpu": "cpu", "cuda": "cuda_graphs"}


def of(config: Config, device: str) -> Backend | None:
    """The backend of a run, limited to the parts that its ``kernels`` and ``linear`` settings allow; none if several
    ranks learn: backends read whole weights in place, and choose by what one process sees."""
    if config.cluster.learner != 1:
        return None
    return find(device, layers=config.kernels == "auto", products=config.linear == "auto")


def find(device: str, *, layers: bool, products: bool) -> Backend | None:
    """The backend for a device, or None. ``layers``: it may run whole models; ``products``: it may compute the matrix
    products of models that run through their own forward."""
    name = BY_DEVICE.get(torch.device(device).type)
    if name is None or not (layers or products):
        return None
    try:
        module = importlib.import_module(f"{ROOM}.{name}.backend")
    except ModuleNotFoundError as error:
        # A missing dependency of an existing backend is an error, not a reason to run without one silently.
        if error.name is None or not error.name.startswith(ROOM):
            raise
        return None
    return module.backend(layers=layers, products=products)
