"""What the server says of itself: its page and its API reference."""
