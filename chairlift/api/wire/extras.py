"""Parameters of other engines that clients send with the values by which they change nothing.

vLLM's: https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html. llama.cpp's: the README of its server,
whose web page sends most of them with each request.
"""

from typing import Annotated, Any

from pydantic import StrictBool, StrictFloat, StrictInt

from chairlift.api.wire.body import Body
from chairlift.api.wire.marks import Idle, Ignored, LeftOut

_NO_SUCH_SAMPLER = "there is no such sampler here"


class VllmExtras(Body):
    """Parameters that vLLM knows, and this server only with one value."""

    skip_special_tokens: Annotated[StrictBool | None, Idle("return_token_ids shows special tokens", (True,))] = None
    spaces_between_special_tokens: Annotated[StrictBool | None, Ignored("texts have no special tokens")] = None
    include_stop_str_in_output: Annotated[StrictBool | None, Idle("stop_reason says which it was", (False,))] = None
    return_tokens_as_token_ids: Annotated[StrictBool | None, Idle("use return_token_ids", (False,))] = None
    use_beam_search: Annotated[StrictBool | None, Idle("answers are sampled", (False,))] = None
    length_penalty: Annotated[StrictFloat | None, Idle("it belongs to beam search", (1.0,))] = None
    early_stopping: Annotated[StrictBool | None, Idle("it belongs to beam search", (False,))] = None
    logits_processors: Annotated[list[Any] | None, Idle("clients' code does not run here", ([],))] = None
    guided_decoding_backend: Annotated[str | None, Ignored("there is one")] = None


class LlamaCppExtras(Body):
    """Parameters that llama.cpp knows, and this server only with the values that turn them off."""

    cache_prompt: Annotated[StrictBool | None, Idle("cache_salt keeps prompts apart", (True,))] = None
    id_slot: Annotated[StrictInt | None, Idle("the server chooses slots", (-1,))] = None
    n_predict: Annotated[StrictInt | None, Idle("use max_tokens", (-1,))] = None
    n_keep: Annotated[StrictInt | None, Ignored("nothing is dropped in the middle of an answer")] = None
    n_probs: Annotated[StrictInt | None, Idle("use logprobs", (0,))] = None
    post_sampling_probs: Annotated[StrictBool | None, Idle("log-probabilities are the model's own", (False,))] = None
    min_keep: Annotated[StrictInt | None, Idle("filters keep at least one token", (0, 1))] = None
    repeat_penalty: Annotated[StrictFloat | None, Idle("use repetition_penalty", (1.0,))] = None
    repeat_last_n: Annotated[StrictInt | None, Ignored("it belongs to repeat_penalty")] = None
    typical_p: Annotated[StrictFloat | None, Idle(_NO_SUCH_SAMPLER, (1.0,))] = None
    typ_p: Annotated[StrictFloat | None, Idle(_NO_SUCH_SAMPLER, (1.0,))] = None
    tfs_z: Annotated[StrictFloat | None, Idle(_NO_SUCH_SAMPLER, (1.0,))] = None
    top_n_sigma: Annotated[StrictFloat | None, Idle(_NO_SUCH_SAMPLER, (-1.0,))] = None
    mirostat: Annotated[StrictInt | None, Idle(_NO_SUCH_SAMPLER, (0,))] = None
    mirostat_tau: Annotated[StrictFloat | None, Ignored("it belongs to mirostat")] = None
    mirostat_eta: Annotated[StrictFloat | None, Ignored("it belongs to mirostat")] = None
    dynatemp_range: Annotated[StrictFloat | None, Idle(_NO_SUCH_SAMPLER, (0.0,))] = None
    dynatemp_exponent: Annotated[StrictFloat | None, Ignored("it belongs to dynatemp_range")] = None
    xtc_probability: Annotated[StrictFloat | None, Idle(_NO_SUCH_SAMPLER, (0.0,))] = None
    xtc_threshold: Annotated[StrictFloat | None, Ignored("it belongs to xtc_probability")] = None
    dry_multiplier: Annotated[StrictFloat | None, Idle(_NO_SUCH_SAMPLER, (0.0,))] = None
    dry_base: Annotated[StrictFloat | None, Ignored("it belongs to dry_multiplier")] = None
    dry_allowed_length: Annotated[StrictInt | None, Ignored("it belongs to dry_multiplier")] = None
    dry_penalty_last_n: Annotated[StrictInt | None, Ignored("it belongs to dry_multiplier")] = None
    samplers: Annotated[list[Any] | None, LeftOut("the order of the filters is fixed", ([],))] = None
    lora: Annotated[list[Any] | None, Idle("there are no adapters here", ([],))] = None
    timings_per_token: Annotated[StrictBool | None, Idle("/metrics has times", (False,))] = None
    return_progress: Annotated[StrictBool | None, Idle("a stream begins with the first token", (False,))] = None


class EngineExtras(VllmExtras, LlamaCppExtras):
    """All of them."""
