"""A model in this process, whose logits are read before anything is sampled from them."""

from collections.abc import Mapping, Sequence

import torch
from pydantic import ValidationError

from chairlift.compare.divergence import Whole
from chairlift.config import EngineConfig
from chairlift.engine.executor import Executor, open_model
from chairlift.engine.ranks import Ranks
from chairlift.engine.text.tokenizer import Tokenizer
from chairlift.errors import ConfigurationError
from chairlift.models.checkpoint import find_model

_FIXED = ("max_seq_len", "max_num_batched_tokens", "max_batch_size", "tensor_parallel_size")


class OwnModel:
    """A `Side` that computes each window as one prompt in one step."""

    def __init__(self, name: str, settings: Mapping[str, str], context: int) -> None:
        """`settings`: fields of `EngineConfig`. `context`: tokens of the longest window."""
        if fixed := [each for each in _FIXED if each in settings]:
            raise ConfigurationError(f"{name}: {fixed[0]} cannot be set here; leave it out")
        try:
            config = EngineConfig.model_validate(
                {**settings, "max_seq_len": context, "max_num_batched_tokens": context, "max_batch_size": 1}
            )
        except ValidationError as error:
            raise _explain(error, name) from error
        self.name = name
        self._tokenizer = Tokenizer(find_model(config.tokenizer or config.model))
        self._executor = Executor(open_model(config), Ranks(config))

    def tokenize(self, text: str) -> list[int]:
        """See `Side`."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def beginning(self) -> int | None:
        """See `Side`."""
        special = self._tokenizer.encode("")
        return special[0] if special and self._tokenizer.encode("a")[0] == special[0] else None

    def score(self, token_ids: Sequence[int], first: int) -> Whole:
        """See `Side`."""
        logits = self._executor.logits(token_ids, slice(first, -1))
        return Whole(torch.log_softmax(logits.float().cpu(), dim=-1))

    def close(self) -> None:
        """Gives the model's memory back."""
        del self._executor


def _explain(error: ValidationError, text: str) -> ConfigurationError:
    """Lists the mistakes in a side's settings, a line for each."""
    lines = (f"{text}: {each['loc'][0] if each['loc'] else ''}: {each['msg']}" for each in error.errors())
    return ConfigurationError("\n".join(lines))
