"""Prefixes saved in a directory: their names (`keys`), their files (`entry`), the directory (`folder`), and the threads
that read (`reader`) and write (`writer`).

Knows tokens, bytes and files, and neither requests nor tensors.
"""
