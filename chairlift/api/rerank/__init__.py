"""Scores of documents for a query: rerank as Cohere and Jina spell it, and score as vLLM does."""
