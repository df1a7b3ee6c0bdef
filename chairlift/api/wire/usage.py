"""The tokens that a request took, in the form that replies are made from."""

from collections.abc import Sequence
from typing import Self

from pydantic import BaseModel

from chairlift.engine.text.deltas import RequestDelta


class PromptTokensDetails(BaseModel):
    """Counts the tokens of the prompts that had been computed for other requests."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Counts the generated tokens that are thoughts, and the speculated tokens that were accepted and rejected."""

    reasoning_tokens: int
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class PromptUsage(BaseModel):
    """Counts the tokens of all prompts, where nothing is generated."""

    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, outputs: Sequence[RequestDelta]) -> Self:
        """Counts the tokens of each prompt."""
        num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        return cls(prompt_tokens=num_tokens, total_tokens=num_tokens)


class Usage(BaseModel):
    """Summed over prompts; a prompt counts once, however many choices continue it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, outputs: Sequence[RequestDelta]) -> Self:
        """Counts the tokens of each prompt by its newest delta."""
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        choices = [choice for output in outputs for choice in output.choices]
        num_generated = sum(choice.num_tokens for choice in choices)
        num_reasoning = sum(choice.num_reasoning_tokens for choice in choices)
        return cls(
            prompt_tokens=num_prompt,
            completion_tokens=num_generated,
            total_tokens=num_prompt + num_generated,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(each.num_cached_tokens for each in outputs)),
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=num_reasoning,
                accepted_prediction_tokens=sum(choice.num_accepted_tokens for choice in choices),
                rejected_prediction_tokens=sum(choice.num_rejected_tokens for choice in choices),
            ),
        )
