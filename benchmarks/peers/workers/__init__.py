"""One script per engine, run by that engine's own Python.

They see the standard library, `peers.workers.protocol`, and what their interpreter has installed: nothing of ours.
"""
