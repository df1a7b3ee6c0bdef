"""Architectures as wiring, attention backends, and the loading of checkpoints."""

from chairlift.models.checkpoint import Checkpoint, open_checkpoint
from chairlift.models.loader import load_adapted, load_model, make_dummy_model

__all__ = ["Checkpoint", "load_adapted", "load_model", "make_dummy_model", "open_checkpoint"]
