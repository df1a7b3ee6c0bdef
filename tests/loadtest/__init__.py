"""Tests of the load test, against a server of a few lines in the same process."""
