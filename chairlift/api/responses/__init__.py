"""OpenAI's Responses: answers in items and named events, which the server keeps if asked to."""
