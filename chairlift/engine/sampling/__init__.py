"""From logits to tokens: the sampler, its draws, penalties and masks, and where tokens are sampled (`guesses`)."""

from chairlift.engine.sampling.guesses import NOTHING_GUESSED, Guessed, Places, up_to_wrong

__all__ = ["NOTHING_GUESSED", "Guessed", "Places", "up_to_wrong"]
