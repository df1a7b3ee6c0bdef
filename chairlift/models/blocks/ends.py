"""Names the weights before and after the layers: the embedding, the last norm and the head."""

from chairlift.models.blocks.block import Cut, Part, Units, Weight

EMBEDDING = "model.embed_tokens.weight"
"""The wiring's name for the embedding."""


def weights_of_ends(vocab_size: int) -> list[Weight]:
    """Their weights. Tied heads have none of their own, and may be stored all the same."""
    tokens = (Units(vocab_size),)
    return [
        Weight("model.embed_tokens", (Part("embed_tokens", "token_embd", tokens),), Cut.PADDED_ROWS),
        Weight.whole("model.norm", "norm", "output_norm"),
        Weight("lm_head", (Part("lm_head", "output", tokens),), Cut.PADDED_ROWS),
    ]
