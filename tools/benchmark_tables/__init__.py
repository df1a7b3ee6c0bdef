"""The tables of the documents that show figures of `benchmarks/results`; see `write_tables.py`."""
