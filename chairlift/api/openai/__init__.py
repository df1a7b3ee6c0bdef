"""OpenAI's completions and chat completions, with vLLM's extensions and its endpoints about tokens."""
