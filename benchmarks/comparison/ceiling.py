"""Workloads, and the most tokens per second that a machine allows for them.

A step reads each weight once and multiplies it once per token. Of experts it reads those that its tokens touch, if each
token chooses by chance, and multiplies a token by those that it chooses.

Prompts are one pass: their FLOPs without the head, but for each prompt's last token. Every further token is one pass
over all requests. A pass takes the larger of its FLOPs over the matrix rate and its bytes (weights and cached keys and
values, states read and written) over the memory bandwidth. Norms, rope, sampling, activations and convolutions count as
nothing.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Self

_MAX_TOKEN_ID = 200  # ids that every vocabulary has, the byte tokenizer's too


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one size, all sent at the same time. Written `32x128+64`: 32 prompts of 128 tokens, 64 out each."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError for anything that is not REQUESTSxPROMPT+OUTPUT, each at least 1."""
        if not (match := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)\+([1-9]\d*)", text)):
            raise ValueError(f"{text!r} is no workload: write REQUESTSxPROMPT+OUTPUT, for instance 8x128+128")
        return cls(*map(int, match.groups()))

    @property
    def name(self) -> str:
        return f"{self.num_requests}x{self.prompt_tokens}+{self.output_tokens}"

    @property
    def is_prefill(self) -> bool:
        """Only the first token is asked for, so prompt tokens are what is counted."""
        return self.output_tokens == 1

    @property
    def unit(self) -> str:
        return "prompt tokens/s" if self.is_prefill else "output tokens/s"

    @property
    def num_counted_tokens(self) -> int:
        """Tokens of all requests that a rate in `unit` counts."""
        return self.num_requests * (self.prompt_tokens if self.is_prefill else self.output_tokens)

    def prompts(self, turn: str, vocab_size: int) -> list[list[int]]:
        """Random token ids: the same for every engine, others for every request and every `turn`."""
        rng, limit = Random(f"{self.name} {turn}"), min(_MAX_TOKEN_ID, vocab_size)
        return [[rng.randrange(limit) for _ in range(self.prompt_tokens)] for _ in range(self.num_requests)]


DEFAULT_WORKLOADS = ["1x128+128", "8x128+128", "32x128+128", "1x1024+1", "32x1024+64"]


@dataclass(frozen=True, slots=True)
class Rates:
    """Holds what the machine does, as measured."""

    bytes_per_second: float  # reading memory
    flops_per_second: float  # products of matrices, in the number format of the weights


@dataclass(frozen=True, slots=True)
class Pass:
    """One run through the layers."""

    num_flops: int
    num_bytes: int

    def seconds(self, rates: Rates) -> float:
        return max(self.num_flops / rates.flops_per_second, self.num_bytes / rates.bytes_per_second)


@dataclass(frozen=True, slots=True)
class Experts:
    """The sizes of a mixture, in every layer but the first dense ones."""

    count: int
    num_chosen: int
    intermediate_size: int
    num_dense_layers: int
    num_shared: int = 0  # beside those that are chosen

    def touched(self, num_tokens: int) -> float:
        """Returns how many experts of a layer the tokens choose together."""
        return self.count * (1 - (1 - self.num_chosen / self.count) ** num_tokens)


_STATE_BYTES = 4  # of a number, which stays in float32
_STATE_FLOPS = 6  # of a number and token: what it answers, how it changes, and what it answers then, two each


@dataclass(frozen=True, slots=True)
class Recurrence:
    """What stands in place of attention in some layers, and the sizes of one such layer."""

    num_layers: int
    num_weights: int  # that a token is multiplied by
    num_states: int = 0  # numbers of a request's state; none of a convolution, whose few tokens count as nothing

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self | None:
        """Reads Gated DeltaNet's sizes (Qwen3-Next, Qwen3.5) or a gated convolution's (LFM2); None if all attend."""
        layers = fields.get("layer_types") or []
        hidden = fields["hidden_size"]
        if num_layers := layers.count("conv"):
            return cls(num_layers, num_weights=4 * hidden * hidden)  # into three of the model's width, and out of one
        if not (num_layers := layers.count("linear_attention")):
            return None
        num_heads, head_dim = fields["linear_num_value_heads"], fields["linear_value_head_dim"]
        key_dim = fields["linear_key_head_dim"]
        values, keys = num_heads * head_dim, fields["linear_num_key_heads"] * key_dim
        inputs = 2 * keys + 2 * values + 2 * num_heads  # queries, keys, values, their gate; two gates of each head
        return cls(num_layers, hidden * (inputs + values), num_states=num_heads * key_dim * head_dim)


@dataclass(frozen=True, slots=True)
class Latents:
    """The sizes of latent attention in every layer."""

    num_weights: int  # that a token is multiplied by
    num_kept: int  # numbers of a token in the cache
    num_read: int  # of these for a head, as key and as value

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self | None:
        """Reads DeepSeek-V2's sizes; None if heads have keys and values of their own."""
        if not (latent := fields.get("kv_lora_rank")):
            return None
        hidden, heads, rank = fields["hidden_size"], fields["num_attention_heads"], fields.get("q_lora_rank")
        still, turning, value = (fields[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        queries = heads * (still + turning)
        of_queries = hidden * queries if rank is None else rank * (hidden + queries)
        of_heads = latent * heads * (still + value)
        num_weights = of_queries + hidden * (latent + turning) + of_heads + hidden * heads * value
        return cls(num_weights, num_kept=latent + turning, num_read=2 * latent + turning)


def _inner_size(fields: Mapping[str, Any]) -> int:
    """Returns an MLP's width. LFM2 takes two thirds of what its config says, in whole multiples."""
    size: int = fields["intermediate_size"]
    if fields.get("block_auto_adjust_ff_dim"):
        multiple = fields["block_multiple_of"]
        size = int(fields.get("block_ffn_dim_multiplier", 1) * int(2 * size / 3))
        size = -(-size // multiple) * multiple
    return size


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model as Llama, with experts or other mixers, and the bytes of one weight and cached number."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    weight_bytes: float
    cache_bytes: int
    experts: Experts | None = None
    recurrence: Recurrence | None = None
    latents: Latents | None = None
    has_output_gate: bool = False  # attention's, as wide as its queries

    @classmethod
    def of(cls, fields: Mapping[str, Any], weight_bytes: float, cache_bytes: int) -> Self:
        """`fields`: a checkpoint's config.json."""
        fields = fields.get("text_config") or fields
        num_heads, experts = fields["num_attention_heads"], None
        if count := fields.get("num_experts"):
            sizes = fields["num_experts_per_tok"], fields["moe_intermediate_size"], fields.get("num_dense_layers", 0)
            experts = Experts(count, *sizes, num_shared=fields.get("n_shared_experts", 0))
        return cls(
            hidden_size=fields["hidden_size"],
            num_layers=fields["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=fields.get("num_key_value_heads") or num_heads,
            head_dim=fields.get("head_dim") or fields["hidden_size"] // num_heads,
            intermediate_size=_inner_size(fields),
            vocab_size=fields["vocab_size"],
            weight_bytes=weight_bytes,
            cache_bytes=cache_bytes,
            experts=experts,
            recurrence=Recurrence.of(fields),
            latents=Latents.of(fields),
            has_output_gate="linear_num_value_heads" in fields,  # attention of these families has one
        )

    @property
    def num_attending(self) -> int:
        """Counts the layers that have keys and values."""
        return self.num_layers - (0 if self.recurrence is None else self.recurrence.num_layers)

    @property
    def num_layer_weights(self) -> int:
        """Weights in the matrices of all layers that a token is multiplied by."""
        return round(self._layer_weights(0 if self.experts is None else self.experts.num_chosen))

    def _layer_weights(self, num_experts: float) -> float:
        """With so many experts of each layer that has some."""
        queries = self.num_heads * (3 if self.has_output_gate else 2)  # and the product with attention's result
        mixers = self.num_attending * self.hidden_size * self.head_dim * (queries + 2 * self.num_kv_heads)
        if self.latents is not None:
            mixers = self.num_attending * self.latents.num_weights
        if self.recurrence is not None:
            mixers += self.recurrence.num_layers * self.recurrence.num_weights
        num_dense = self.num_layers if self.experts is None else self.experts.num_dense_layers
        inner: float = num_dense * self.intermediate_size
        if self.experts is not None:
            num_experts += self.experts.num_shared
            inner += (self.num_layers - num_dense) * self.experts.intermediate_size * num_experts
        return mixers + 3 * self.hidden_size * inner

    @property
    def num_head_weights(self) -> int:
        return self.vocab_size * self.hidden_size

    def attention_flops(self, num_pairs: int) -> int:
        """FLOPs for that many pairs of a query and a key: a product and a sum for each number, for keys and values."""
        num_read = 2 * self.head_dim if self.latents is None else self.latents.num_read
        return 2 * self.num_attending * self.num_heads * num_read * num_pairs

    def cached_bytes(self, num_tokens: int) -> int:
        """Keys and values of all layers that attend."""
        num_kept = 2 * self.num_kv_heads * self.head_dim if self.latents is None else self.latents.num_kept
        return self.num_attending * num_kept * self.cache_bytes * num_tokens

    @property
    def num_states(self) -> int:
        """Counts the numbers of a request's states in all layers."""
        return 0 if self.recurrence is None else self.recurrence.num_layers * self.recurrence.num_states

    @property
    def token_flops(self) -> int:
        """Counts the FLOPs of one token in all layers, but for its attention to others."""
        return 2 * self.num_layer_weights + _STATE_FLOPS * self.num_states

    @property
    def state_bytes(self) -> int:
        """Counts what a decode step moves of a request's states, which it reads and writes."""
        return 2 * _STATE_BYTES * self.num_states

    def read_bytes(self, num_tokens: int) -> int:
        """Returns what a pass of so many tokens reads of the weights."""
        touched = 0 if self.experts is None else self.experts.touched(num_tokens)
        return round(self.weight_bytes * (self._layer_weights(touched) + self.num_head_weights))


def prefill(shape: ModelShape, workload: Workload) -> Pass:
    """All prompts, and each one's first token."""
    length = workload.prompt_tokens
    layers = shape.token_flops * length + shape.attention_flops(length * (length + 1) // 2)
    read = shape.read_bytes(workload.num_requests * length)
    return Pass(workload.num_requests * (layers + 2 * shape.num_head_weights), read)


def decode_step(shape: ModelShape, workload: Workload, num_generated: int) -> Pass:
    """One more token for each request, each of which has that many already, the last of them not in the cache yet."""
    num_cached = workload.prompt_tokens + num_generated - 1
    flops = shape.token_flops + 2 * shape.num_head_weights + shape.attention_flops(num_cached + 1)
    moved = shape.cached_bytes(num_cached) + shape.state_bytes
    return Pass(workload.num_requests * flops, shape.read_bytes(workload.num_requests) + workload.num_requests * moved)


def least_seconds(shape: ModelShape, workload: Workload, rates: Rates) -> float:
    """For the whole workload."""
    steps = [decode_step(shape, workload, count) for count in range(1, workload.output_tokens)]
    return sum(each.seconds(rates) for each in [prefill(shape, workload), *steps])


def most_tokens_per_second(shape: ModelShape, workload: Workload, rates: Rates) -> float:
    """In the workload's unit."""
    return workload.num_counted_tokens / least_seconds(shape, workload, rates)
