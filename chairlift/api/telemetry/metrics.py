"""`/metrics`: what the engine and the HTTP side have counted, for Prometheus.

Counting updates integers and lists where things happen; only a scrape makes metric families of them, at most ten times
a second for all who ask (`Paced`). It reads the engine's counters as of its newest launch and asks it nothing, so it
waits for no step and works for a dead engine.

With several API workers, each counts what it serves, and a scrape of any of them shows the sums.

Label values are known beforehand: states, outcomes, statuses, the server's own paths. None comes from a client.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Self

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

import chairlift
from chairlift.api.telemetry.observation import Observation, Outcome
from chairlift.engine.async_llm import AsyncLLM
from chairlift.engine.journal import TOKEN_COUNTS, WAIT_SECONDS, EngineStats, Histogram, SlotState

_CONFIG_FIELDS = (
    *("device", "dtype", "quantization", "attention_backend", "max_batch_size", "max_seq_len"),
    *("kv_cache_memory_bytes", "speculation", "max_num_batched_tokens", "max_steps_per_launch"),
    *("max_queue_size", "enable_prefix_caching"),
)

_Table = Mapping[str, tuple[str, str]]
"""By name (Prometheus appends `_total` to counters): the path of the value in `EngineStats`, and a description."""

_GAUGES: _Table = {
    "chairlift_requests_running": ("num_running", "Requests that have a slot."),
    "chairlift_requests_waiting": ("num_waiting", "Requests that wait for a slot."),
    "chairlift_cache_usage": ("cache.share", "Share of the cache's memory that requests hold, 0 to 1."),
    "chairlift_state_snapshot_bytes": (
        "num_snapshot_bytes",
        "Bytes of recurrent states that are kept for later prompts, in models that have such states.",
    ),
    "chairlift_saved_prefix_bytes": ("saved.num_bytes_held", "Bytes of prompts of this model on disk."),
}
_COUNTERS: _Table = {
    "chairlift_prompt_tokens": (
        "totals.num_prompt_tokens",
        "Prompt tokens of requests whose prompt was computed, the cached ones included.",
    ),
    "chairlift_cached_tokens": (
        "totals.num_cached_tokens",
        "Prompt tokens that were not computed because a slot held them already.",
    ),
    "chairlift_generated_tokens": ("totals.num_generated_tokens", "Tokens generated."),
    "chairlift_preemptions": (
        "totals.num_preemptions",
        "Times that a request lost its slot, to another or for lack of memory.",
    ),
    "chairlift_spec_drafted_tokens": ("totals.num_drafted_tokens", "Guessed tokens that were verified."),
    "chairlift_spec_accepted_tokens": (
        "totals.num_accepted_tokens",
        "Guessed tokens that became part of an answer.",
    ),
    "chairlift_saved_prefix_hits": ("saved.num_reads", "Prompts of which a part was read from disk."),
    "chairlift_saved_prefix_tokens": ("saved.num_tokens_read", "Prompt tokens read from disk instead of computed."),
    "chairlift_saved_prefix_read_bytes": ("saved.num_bytes_read", "Bytes of prompts read from disk."),
    "chairlift_saved_prefix_written_bytes": ("saved.num_bytes_written", "Bytes of prompts written to disk."),
    "chairlift_saved_prefix_seconds_saved": (
        "saved.seconds_saved",
        "Seconds that prompts read from disk would have taken to be computed, beyond those of reading.",
    ),
}
_HISTOGRAMS: _Table = {
    "chairlift_step_duration_seconds": (
        "step_seconds",
        "Time of a step of the engine; a launch of several steps counts as several with equal shares.",
    ),
    "chairlift_step_rows": ("step_rows", "Requests in a step: the batch size."),
    "chairlift_step_tokens": ("step_tokens", "Tokens computed in a step."),
    "chairlift_state_distance_tokens": (
        "state_distances",
        "Tokens of a prompt that a slot held and that were computed again, because the nearest state was so far away.",
    ),
    "chairlift_queue_time_seconds": ("queue_seconds", "Time from a request's arrival to its first slot."),
    "chairlift_time_to_first_token_seconds": (
        "first_token_seconds",
        "Time from a request's arrival to its first token.",
    ),
    "chairlift_inter_token_latency_seconds": (
        "inter_token_seconds",
        "Time from one token of a request to its next; tokens of one launch share its time equally.",
    ),
}

_VLLM_GAUGES: _Table = {
    "vllm:num_requests_running": ("num_running", "chairlift_requests_running."),
    "vllm:num_requests_waiting": ("num_waiting", "chairlift_requests_waiting."),
    "vllm:kv_cache_usage_perc": ("cache.share", "chairlift_cache_usage, a share in spite of its name."),
    "vllm:gpu_cache_usage_perc": ("cache.share", "chairlift_cache_usage, as the production stack asks for it."),
    "vllm:gpu_prefix_cache_hit_rate": (
        "totals.cached_share",
        "chairlift_cached_tokens_total over chairlift_prompt_tokens_total.",
    ),
}
_VLLM_COUNTERS: _Table = {
    "vllm:prefix_cache_queries": ("totals.num_prompt_tokens", "chairlift_prompt_tokens_total."),
    "vllm:prefix_cache_hits": ("totals.num_cached_tokens", "chairlift_cached_tokens_total."),
    "vllm:gpu_prefix_cache_queries": ("totals.num_prompt_tokens", "chairlift_prompt_tokens_total, for the stack."),
    "vllm:gpu_prefix_cache_hits": ("totals.num_cached_tokens", "chairlift_cached_tokens_total, for the stack."),
}
SCRAPE_INTERVAL_S = 0.1
"""Figures are taken and written at most once in this time."""

_OPEN_METRICS, _PLAIN = "application/openmetrics-text", ""  # as `Accept`
_VLLM_BLOCK = 16  # tokens. Our cache has no blocks, but routers multiply by their number and hash prompts in blocks


class Counts:
    """Counts of the HTTP side."""

    def __init__(self) -> None:
        self.outcomes: Counter[Outcome] = Counter()
        self.responses: Counter[tuple[str, int]] = Counter()
        self.request_seconds = Histogram(WAIT_SECONDS)
        self.prompt_lengths = Histogram(TOKEN_COUNTS)
        self.output_lengths = Histogram(TOKEN_COUNTS)

    def __iadd__(self, other: "Counts") -> Self:
        for name, counted in vars(other).items():
            vars(self)[name] += counted
        return self

    def histograms(self) -> dict[str, tuple[Histogram, str]]:
        """By name, with a description."""
        return {
            "chairlift_request_duration_seconds": (
                self.request_seconds,
                "Time from the headers of an HTTP request for tokens to the end of its reply, where all was generated.",
            ),
            "chairlift_request_prompt_tokens": (self.prompt_lengths, "Length of a prompt that was continued."),
            "chairlift_request_generated_tokens": (self.output_lengths, "Length of what was generated."),
        }

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
        self._texts: dict[str, tuple[bytes, str]] = {}

    def render(self, accepted: str, engine_pid: int) -> tuple[bytes, str]:
        """The exposition and its content type: OpenMetrics where the header `Accept` asks for that.

        Each of the two is written once: versions that clients make up do not add any.
        """
        try:
            is_open = choose_encoder(accepted)[1].startswith(_OPEN_METRICS)
        except (TypeError, ValueError):  # what the library raises for versions that are not numbers
            is_open = False
        kind = _OPEN_METRICS if is_open else _PLAIN
        if kind not in self._texts:
            self._texts[kind] = self._write(kind, engine_pid)
        return self._texts[kind]

    def _write(self, kind: str, engine_pid: int) -> tuple[bytes, str]:
        encode, content_type = choose_encoder(kind)
        registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(pid=lambda: engine_pid, registry=registry)
        return encode(registry), content_type

    def collect(self) -> Iterator[Metric]:
        stats, counts, use = self._stats, self._counts, self._stats.cache
        yield self._info()
        is_up = int(self._llm.is_healthy)
        yield GaugeMetricFamily("chairlift_engine_up", "1 while new requests are served, else 0.", is_up)
        yield from self._read(GaugeMetricFamily, _GAUGES)
        yield from self._read(CounterMetricFamily, _COUNTERS)
        yield _labelled(
            GaugeMetricFamily("chairlift_slots", "Cache slots by state.", labels=["state"]),
            self._slots(stats),
        )
        yield _labelled(
            GaugeMetricFamily("chairlift_cache_tokens", "Tokens that the cache has memory for.", labels=["state"]),
            {("free",): use.num_free, ("warm",): use.num_warm, ("running",): use.num_running},
        )
        yield _labelled(
            CounterMetricFamily(
                "chairlift_spec_accepted_tokens_by_position",
                "Guessed tokens that became part of an answer, by their place in the guess, from 1.",
                labels=["position"],
            ),
            {(str(place),): count for place, count in enumerate(stats.accepted_at or (0,), 1)},
        )
        description = "Finished sequences, one per prompt and choice."
        yield _labelled(
            CounterMetricFamily("chairlift_requests", description, labels=["outcome"]),
            {(outcome,): counts.outcomes[outcome] for outcome in Outcome},
        )
        yield _labelled(
            CounterMetricFamily("chairlift_http_responses", "HTTP replies that have begun.", labels=["path", "status"]),
            {(path, str(status)): count for (path, status), count in sorted(counts.responses.items())},
        )
        for name, (source, description) in _HISTOGRAMS.items():
            yield _histogram(name, description, attrgetter(source)(stats))
        for name, (histogram, description) in counts.histograms().items():
            yield _histogram(name, description, histogram)
        if self._has_vllm_names:
            yield from self._vllm_families()

    def _read(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        table: _Table,
        labels: Mapping[str, str] | None = None,
    ) -> Iterator[Metric]:
        """A metric family for each row of a table."""
        labels = labels or {}
        for name, (source, description) in table.items():
            count = attrgetter(source)(self._stats)
            yield _labelled(kind(name, description, labels=list(labels)), {tuple(labels.values()): count})

    def _info(self) -> Metric:
        config = self._llm.config
        known = {name: getattr(config, name) for name in _CONFIG_FIELDS}
        labels = {name: str(value).lower() if value is not None else "none" for name, value in known.items()}
        return InfoMetricFamily(
            "chairlift_engine",
            "The model that is served, the version that serves it, and its configuration.",
            {"model": self._model_name, "version": chairlift.__version__, **labels},
        )

    def _vllm_families(self) -> Iterator[Metric]:
        """Serves the Gateway API inference extension, llm-d and vLLM's production stack, with vLLM's label."""
        labels = {"model_name": self._model_name}
        yield from self._read(GaugeMetricFamily, _VLLM_GAUGES, labels)
        yield from self._read(CounterMetricFamily, _VLLM_COUNTERS, labels)
        num_blocks = self._stats.cache.num_tokens // _VLLM_BLOCK
        blocks = {"block_size": str(_VLLM_BLOCK), "num_gpu_blocks": str(num_blocks)}
        yield InfoMetricFamily("vllm:cache_config", "The size of the cache.", labels | blocks)

    def _slots(self, stats: EngineStats) -> dict[tuple[str, ...], int]:
        busy: dict[tuple[str, ...], int] = {
            (SlotState.WARM,): stats.num_warm,
            (SlotState.PREFILLING,): stats.num_prefilling,
            (SlotState.DECODING,): stats.num_decoding,
        }
        return {(SlotState.FREE,): self._llm.config.num_slots - sum(busy.values()), **busy}


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
