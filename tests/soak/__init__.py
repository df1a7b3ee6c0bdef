"""The parts of `-m tests.soak`: mixed load for a server, and the state that must balance after it."""
