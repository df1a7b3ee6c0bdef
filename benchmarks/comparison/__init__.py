"""The parts of compare.py: engines in processes of their own, taking turns at the same workloads."""
