"""The parts of simulate.py and scheduler_cost.py: the real scheduler and the cache's books, without a model."""
