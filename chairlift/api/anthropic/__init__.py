"""Anthropic's Messages, with the errors and the header for keys that its clients know."""
