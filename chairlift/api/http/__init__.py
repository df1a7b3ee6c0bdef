"""The layer between sockets and endpoints."""
