"""From logits to tokens. Never reaches text."""
