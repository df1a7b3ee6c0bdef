"""Architectures, attention backends, and the loading of checkpoints."""

from chairlift.models.backends import find_obstacle, load_backend, load_forward
from chairlift.models.checkpoint import Checkpoint, open_checkpoint
from chairlift.models.forward import InvariantForward, PiecewiseForward, TorchForward
from chairlift.models.loader import load_adapted, load_model, make_dummy_model

__all__ = [
    "Checkpoint",
    "InvariantForward",
    "PiecewiseForward",
    "TorchForward",
    "find_obstacle",
    "load_adapted",
    "load_backend",
    "load_forward",
    "load_model",
    "make_dummy_model",
    "open_checkpoint",
]
