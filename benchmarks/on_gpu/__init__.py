"""Says what benchmarks/gpu.py measures: each part in a process of its own, so that one that fails takes no other with
it.
"""
