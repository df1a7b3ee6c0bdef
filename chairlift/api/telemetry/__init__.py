"""Records requests: observes them, and makes log, metrics and traces of that."""
