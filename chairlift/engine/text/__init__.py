"""Text: prompts in, outputs out, grammars compiled. Nothing here knows the model's tensors."""
