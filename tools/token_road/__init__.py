"""The token's road: the files that one streamed chat runs, beside what the documents say; see `write_road.py`."""
