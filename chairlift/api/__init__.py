"""The HTTP server. Importing this loads its settings only, neither aiohttp nor torch."""

from chairlift.api.settings import KEYS_VARIABLE, LogFormat, ServerConfig

__all__ = ["KEYS_VARIABLE", "LogFormat", "ServerConfig"]
