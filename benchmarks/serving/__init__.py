"""What measurements of running servers and of mixed steps have in common."""
