"""What is told about requests: metrics, log lines, traces."""
