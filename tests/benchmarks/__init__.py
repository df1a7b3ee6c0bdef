"""Tests of the scripts in benchmarks/. They need none of the engines that the scripts compare with."""
