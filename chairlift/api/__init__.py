"""HTTP: wire models, handlers, server-sent events, errors, and the server's life."""
