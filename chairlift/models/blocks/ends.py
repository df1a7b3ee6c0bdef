"""Names the weights before and after the layers: the embedding, the last norm and the head."""

from chairlift.models.blocks.block import Cut, Part, Units, Weight

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Hugging Face's names for a family's embedding and head, which are also the wiring's."""


def weights_of_ends(vocab_size: int) -> list[Weight]:
    """Their weights. Tied heads have none of their own, and may be stored all the same."""
    tokens = (Units(vocab_size),)
    embedding, head = EMBEDDING.removesuffix(".weight"), HEAD.removesuffix(".weight")
    return [
        Weight(embedding, (Part(embedding, "token_embd", tokens),), Cut.PADDED_ROWS),
        Weight.whole("model.norm", "model.norm", "output_norm"),
        Weight(head, (Part(head, "output", tokens),), Cut.PADDED_ROWS),
    ]
