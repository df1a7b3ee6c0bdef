"""How many tokens a request took."""

from collections.abc import Sequence

from pydantic import BaseModel

from chairlift.params import RequestOutput


class PromptTokensDetails(BaseModel):
    """What of the prompts had been computed for other requests."""

    cached_tokens: int


class Usage(BaseModel):
    """Summed over prompts; a prompt counts once, however many choices continue it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput]) -> "Usage":
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        num_generated = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
        num_cached = sum(output.num_cached_tokens for output in outputs)
        return cls(
            prompt_tokens=num_prompt,
            completion_tokens=num_generated,
            total_tokens=num_prompt + num_generated,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
        )
