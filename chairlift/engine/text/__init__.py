"""Text processing: prompts, outputs, and the compilation of grammars. Nothing here uses the model's tensors."""
