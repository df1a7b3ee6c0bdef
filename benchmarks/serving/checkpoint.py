"""A checkpoint that can be talked to: any weights, with a tokenizer in which every id is a word of its own.

Weights of random numbers answer with any of their ids. Here each of them is a word that is read back as that very id,
so a conversation's next turn repeats an answer token by token, on every server alike. The chat template writes one
token before and one after each message.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from chairlift.bench.prompts import WORDS

UNKNOWN = "<unk>"
ROLES = ("system", "user", "assistant")
END_OF_MESSAGE = "<|end|>"
MESSAGE_TOKENS = 2  # what the template adds to each message
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPACE = "▁"


def make_servable(weights: Path, directory: Path, max_positions: int) -> Path:
    """Writes a checkpoint with the weights of another, by links, for so many positions; returns its directory."""
    directory.mkdir(parents=True)
    for file in weights.glob("model*"):
        (directory / file.name).symlink_to(file.resolve())
    config = json.loads((weights / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = max_positions
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    word_tokenizer(config["vocab_size"]).save_pretrained(directory)
    return directory


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """The load test's words first, then as many more as it takes; the marks of messages are the last ids.

    The marks are no special tokens: an answer that holds one is repeated with it.
    """
    marks = [*(f"<|{role}|>" for role in ROLES), END_OF_MESSAGE]
    num_more = vocab_size - len(WORDS) - len(marks) - 1
    if num_more < 0:
        raise ValueError(f"a vocabulary of {vocab_size} has no room for the {len(WORDS)} words of the load test")
    words = [*WORDS, *(f"word{number}" for number in range(num_more))]
    vocab = {UNKNOWN: 0} | {_SPACE + word: position for position, word in enumerate(words, 1)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE)
    tokenizer.decoder = decoders.Metaspace(replacement=_SPACE)
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, unk_token=UNKNOWN, chat_template=CHAT_TEMPLATE
    )
