"""The parts of `benchmarks/soak.py`: mixed load for a server, and the books that must balance after it."""
