"""`/metrics`: what the engine and the HTTP side have counted, for Prometheus.

Counting is integers and lists where things happen; only a scrape makes metric families of them. It reads the engine's
books as of its newest launch and asks the engine nothing, so that it waits for no step and works for a dead engine.

Where there are several API workers, each counts what it serves, and whichever is asked shows the sums.

Labels hold what the server knows beforehand: states, outcomes, statuses, its own paths. Nothing that a client chose.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Self

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

import chairlift
from chairlift.api.telemetry import Observation, Outcome
from chairlift.engine.async_llm import AsyncLLM
from chairlift.engine.journal import TOKEN_COUNTS, WAIT_SECONDS, EngineStats, Histogram, SlotState, Totals

_CONFIG_FIELDS = (
    *("device", "dtype", "quantization", "attention_backend", "max_batch_size", "max_seq_len"),
    *("kv_cache_memory_bytes", "speculation"),
    *("max_num_batched_tokens", "max_steps_per_launch", "max_queue_size", "enable_prefix_caching"),
)

_COUNTERS: tuple[tuple[str, str, Callable[[Totals], int]], ...] = (
    (
        "chairlift_prompt_tokens",
        "Prompt tokens of requests whose prompt was computed, the cached ones included.",
        lambda totals: totals.num_prompt_tokens,
    ),
    (
        "chairlift_cached_tokens",
        "Prompt tokens that were not computed because a slot held them already.",
        lambda totals: totals.num_cached_tokens,
    ),
    ("chairlift_generated_tokens", "Tokens generated.", lambda totals: totals.num_generated_tokens),
    (
        "chairlift_preemptions",
        "Times that a request lost its slot, to another or for lack of memory.",
        lambda totals: totals.num_preemptions,
    ),
    (
        "chairlift_spec_drafted_tokens",
        "Tokens that were guessed and verified.",
        lambda totals: totals.num_drafted_tokens,
    ),
    (
        "chairlift_spec_accepted_tokens",
        "Tokens that were guessed and are part of an answer.",
        lambda totals: totals.num_accepted_tokens,
    ),
)
"""Name, to which Prometheus adds `_total`; description; where the engine counts it."""

_VLLM_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("vllm:num_requests_running", "chairlift_requests_running.", lambda stats: stats.num_running),
    ("vllm:num_requests_waiting", "chairlift_requests_waiting.", lambda stats: stats.num_waiting),
    (
        "vllm:kv_cache_usage_perc",
        "chairlift_cache_usage, a share in spite of its name.",
        lambda stats: stats.cache.share,
    ),
    (
        "vllm:gpu_cache_usage_perc",
        "chairlift_cache_usage, as older routers ask for it.",
        lambda stats: stats.cache.share,
    ),
)
_VLLM_COUNTERS: tuple[tuple[str, str, Callable[[Totals], int]], ...] = (
    ("vllm:prefix_cache_queries", "chairlift_prompt_tokens_total.", lambda totals: totals.num_prompt_tokens),
    ("vllm:prefix_cache_hits", "chairlift_cached_tokens_total.", lambda totals: totals.num_cached_tokens),
)
_VLLM_BLOCK = 16  # tokens. Our cache has no blocks; routers multiply by their number, and hash prompts in such pieces

_HISTOGRAMS: tuple[tuple[str, str, Callable[[EngineStats], Histogram]], ...] = (
    (
        "chairlift_step_duration_seconds",
        "Time of a step of the engine; a launch of several steps counts as several with equal shares.",
        lambda stats: stats.step_seconds,
    ),
    ("chairlift_step_rows", "Requests in a step: the batch size.", lambda stats: stats.step_rows),
    ("chairlift_step_tokens", "Tokens computed in a step.", lambda stats: stats.step_tokens),
    (
        "chairlift_queue_time_seconds",
        "Time from a request's arrival to its first slot.",
        lambda stats: stats.queue_seconds,
    ),
    (
        "chairlift_time_to_first_token_seconds",
        "Time from a request's arrival to its first token.",
        lambda stats: stats.first_token_seconds,
    ),
    (
        "chairlift_inter_token_latency_seconds",
        "Time from one token of a request to its next; tokens of one launch share its time equally.",
        lambda stats: stats.inter_token_seconds,
    ),
)


class Counts:
    """What the HTTP side has counted."""

    def __init__(self) -> None:
        self.outcomes: Counter[Outcome] = Counter()
        self.responses: Counter[tuple[str, int]] = Counter()
        self.request_seconds = Histogram(WAIT_SECONDS)
        self.prompt_lengths = Histogram(TOKEN_COUNTS)
        self.output_lengths = Histogram(TOKEN_COUNTS)

    def __iadd__(self, other: "Counts") -> Self:
        """Adds what another worker has counted."""
        self.outcomes += other.outcomes
        self.responses += other.responses
        self.request_seconds += other.request_seconds
        self.prompt_lengths += other.prompt_lengths
        self.output_lengths += other.output_lengths
        return self

    def note_response(self, path: str, status: int) -> None:
        """A reply begins. `path` is one of a route's, or "other"."""
        self.responses[path, status] += 1

    def note_request(self, observation: Observation) -> None:
        """A request for tokens is over. Durations and lengths count if all of it was generated."""
        outcomes = observation.outcomes
        self.outcomes.update(outcomes)
        if not outcomes or not {Outcome.STOP, Outcome.LENGTH}.issuperset(outcomes):
            return
        if observation.total_seconds is not None:
            self.request_seconds.add(observation.total_seconds)
        for generation in observation.generations:
            self.prompt_lengths.add(len(generation.prompt_token_ids))
        for length in observation.output_lengths:
            self.output_lengths.add(length)


class Metrics(Collector):
    """The families of one scrape."""

    def __init__(
        self, llm: AsyncLLM, model_name: str, stats: EngineStats, counts: Counts, has_vllm_names: bool = False
    ) -> None:
        self._llm = llm
        self._model_name = model_name
        self._stats = stats
        self._counts = counts
        self._has_vllm_names = has_vllm_names

    def render(self, accepted: str, engine_pid: int) -> tuple[bytes, str]:
        """The exposition and its content type: OpenMetrics where the header `Accept` asks for that."""
        try:
            encode, content_type = choose_encoder(accepted)
        except (TypeError, ValueError):  # what the library raises for versions that are not numbers
            encode, content_type = choose_encoder("")
        registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(pid=lambda: engine_pid, registry=registry)
        return encode(registry), content_type

    def collect(self) -> Iterator[Metric]:
        """All families, as of now."""
        stats, counts = self._stats, self._counts
        is_up = int(self._llm.is_healthy)
        yield self._info()
        yield GaugeMetricFamily("chairlift_engine_up", "1 while new requests are served, else 0.", is_up)
        yield GaugeMetricFamily("chairlift_requests_running", "Requests that have a slot.", stats.num_running)
        yield GaugeMetricFamily("chairlift_requests_waiting", "Requests that wait for a slot.", stats.num_waiting)
        yield _labelled(
            GaugeMetricFamily("chairlift_slots", "Cache slots by state.", labels=["state"]), self._slots(stats)
        )
        use = stats.cache
        yield _labelled(
            GaugeMetricFamily("chairlift_cache_tokens", "Tokens that the cache has memory for.", labels=["state"]),
            {("free",): use.num_free, ("warm",): use.num_warm, ("running",): use.num_running},
        )
        description = "Share of the cache's memory that requests hold, 0 to 1."
        yield GaugeMetricFamily("chairlift_cache_usage", description, use.share)
        for name, description, read_total in _COUNTERS:
            yield CounterMetricFamily(name, description, read_total(stats.totals))
        yield _labelled(
            CounterMetricFamily(
                "chairlift_spec_accepted_tokens_by_position",
                "Tokens that were guessed and are part of an answer, by their place in the guess, from 1.",
                labels=["position"],
            ),
            {(str(place),): count for place, count in enumerate(stats.accepted_at or (0,), 1)},
        )
        description = "Sequences that came to an end, one per prompt and choice."
        yield _labelled(
            CounterMetricFamily("chairlift_requests", description, labels=["outcome"]),
            {(outcome,): counts.outcomes[outcome] for outcome in Outcome},
        )
        yield _labelled(
            CounterMetricFamily("chairlift_http_responses", "Replies that were begun.", labels=["path", "status"]),
            {(path, str(status)): count for (path, status), count in sorted(counts.responses.items())},
        )
        for name, description, read in _HISTOGRAMS:
            yield _histogram(name, description, read(stats))
        yield _histogram(
            "chairlift_request_duration_seconds",
            "Time from the headers of an HTTP request for tokens to the end of its reply, where all was generated.",
            counts.request_seconds,
        )
        yield _histogram(
            "chairlift_request_prompt_tokens", "Length of a prompt that was continued.", counts.prompt_lengths
        )
        yield _histogram("chairlift_request_generated_tokens", "Length of what was generated.", counts.output_lengths)
        if self._has_vllm_names:
            yield from self._vllm_families(stats)

    def _info(self) -> Metric:
        config = self._llm.config
        known = {name: getattr(config, name) for name in _CONFIG_FIELDS}
        labels = {name: str(value).lower() if value is not None else "none" for name, value in known.items()}
        return InfoMetricFamily(
            "chairlift_engine",
            "The model that is served, the version that serves it, and its configuration.",
            {"model": self._model_name, "version": chairlift.__version__, **labels},
        )

    def _vllm_families(self, stats: EngineStats) -> Iterator[Metric]:
        """What the Gateway API inference extension, llm-d and vLLM's production stack read, with vLLM's label."""
        labels = {"model_name": self._model_name}
        model = (self._model_name,)
        for name, description, read in _VLLM_GAUGES:
            yield _labelled(GaugeMetricFamily(name, description, labels=list(labels)), {model: read(stats)})
        for name, description, read_total in _VLLM_COUNTERS:
            counter = CounterMetricFamily(name, description, labels=list(labels))
            yield _labelled(counter, {model: read_total(stats.totals)})
        num_blocks = stats.cache.num_tokens // _VLLM_BLOCK
        blocks = {"block_size": str(_VLLM_BLOCK), "num_gpu_blocks": str(num_blocks)}
        yield InfoMetricFamily("vllm:cache_config", "The size of the cache.", labels | blocks)

    def _slots(self, stats: EngineStats) -> dict[tuple[str, ...], int]:
        counts = {
            SlotState.WARM: stats.num_warm,
            SlotState.PREFILLING: stats.num_prefilling,
            SlotState.DECODING: stats.num_decoding,
        }
        num_free = self._llm.config.num_slots - sum(counts.values())
        return {(state,): count for state, count in {SlotState.FREE: num_free, **counts}.items()}


def _labelled(
    family: GaugeMetricFamily | CounterMetricFamily, counts: Mapping[tuple[str, ...], float]
) -> GaugeMetricFamily | CounterMetricFamily:
    """The family with a count for each value of its labels."""
    for values, count in counts.items():
        family.add_metric(list(values), count)
    return family


def _histogram(name: str, description: str, distribution: Histogram) -> Metric:
    bounds = [str(float(bound)) for bound in distribution.bounds] + ["+Inf"]
    buckets = list(zip(bounds, distribution.cumulative, strict=True))
    return HistogramMetricFamily(name, description, buckets, distribution.sum)
