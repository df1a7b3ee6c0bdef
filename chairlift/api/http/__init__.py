"""Connections, bodies, keys: what lies between a socket and an endpoint."""
