"""The shapes of requests and replies: OpenAI's specification plus vLLM's extensions. Unknown fields are refused."""
