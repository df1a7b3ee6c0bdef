"""What is recorded of requests: their observation, and the log, metrics and traces that are made of it."""
