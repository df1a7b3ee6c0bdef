"""From a plan to tensors and tokens: the only place where a step plan is executed with the model.

One launch may have several decode steps. Each passes its sampled tokens to the next on the device, and the tokens of
all steps are copied to the host together at the end. Nothing in `launch` waits for the device, so that on an
asynchronous device the next launch can begin before this one's tokens are known: it looks up a row's last token on the
device, by slot. Only masks of grammars that depend on such a token are applied after a wait for it, when the forward
pass has been launched.
"""

import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from chairlift.cache import ContinuousBatchingKVCacheManager
from chairlift.cache.transfer import TokenBytes, copy_out, count_bytes
from chairlift.device import Arrival, bring, on_device, to_device
from chairlift.engine.execution.last_tokens import LastTokens
from chairlift.engine.execution.operators import OperatorSteps, first_batch, input_ids
from chairlift.engine.execution.recorded_steps import Steps
from chairlift.engine.execution.recordings import Recordings
from chairlift.engine.sampling import Places, up_to_wrong
from chairlift.engine.sampling.drawing import INVALID_TOKEN, GraphSampling, prepare_graph_sampling
from chairlift.engine.sampling.pending_masks import PendingMasks
from chairlift.engine.sampling.prompt_results import PendingResults
from chairlift.engine.sampling.sampler import LogprobTensors, Sampled, Sampler, SamplingBatch
from chairlift.models.attention import Forward
from chairlift.params import TokenLogprobs
from chairlift.plan import Job, RowResult, SlotRange, StepPlan

logger = logging.getLogger(__name__)

_NOT_A_NUMBER = "no valid token could be computed for this sequence: its logits are not finite, or no token was allowed"
_NOT_FINITE = "what was computed of this prompt is not finite"
_NO_MEMORY = (
    "the device ran out of memory in a step with this sequence; lower max_num_batched_tokens or kv_cache_memory_bytes"
)


@dataclass(slots=True)
class _Outputs:
    """A launch's outputs for the host; the rows of a tensor are the places where tokens were sampled."""

    tokens: torch.Tensor | None  # int64 [N, num_steps]; None: no row was sampled
    logprobs: LogprobTensors | None  # of the places that asked for them, step by step
    prompt_results: PendingResults | None
    sampling: SamplingBatch | None  # None: a graph sampled
    results: list[RowResult] | None = None  # what was made of them, once they had reached the host

    @property
    def masks(self) -> PendingMasks | None:
        return None if self.sampling is None else self.sampling.masks

    @classmethod
    def gather(
        cls, steps: list[Sampled], sampling: SamplingBatch | None, prompt_results: PendingResults | None = None
    ) -> "_Outputs":
        """Starts copying the results of all steps to the host."""
        parts = [step.logprobs for step in steps if step.logprobs is not None]
        return cls(
            tokens=bring(torch.stack([step.tokens for step in steps], dim=1)) if steps else None,
            logprobs=LogprobTensors.join(parts).bring() if parts else None,
            prompt_results=prompt_results,
            sampling=sampling,
        )


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Launch:
    """A plan that was launched. Later launches find its keys, values and tokens on the device."""

    plan: StepPlan
    outputs: _Outputs | None  # None: it ran out of memory
    arrival: Arrival
    begin: float  # `time.perf_counter()` at its beginning
    is_repeatable: bool = True  # its rows can be computed again; False: they have recurrent states, which have moved on

    def wait(self) -> list[RowResult]:
        """Waits for the end of the launch; results by row of the plan. Raises the device's error, if any."""
        self.arrival.wait()
        if self.outputs is None:
            return _results_without_memory(self.plan, is_repeatable=self.is_repeatable)
        if self.outputs.results is None:  # grammars take their tokens once
            self.outputs.results = _results_by_row(self.plan, self.outputs)
        return self.outputs.results


class ModelRunner:
    """Executes step plans on one device, in the order in which they are launched."""

    def __init__(
        self,
        forward: Forward,
        cache: ContinuousBatchingKVCacheManager,
        sampler: Sampler,
        last_tokens: LastTokens,
        recordings: Recordings | None = None,
        *,
        is_divided: bool = False,
    ) -> None:
        """`last_tokens` is shared with the recordings, if there are any: these run the launches that they suffice for.

        `is_divided`: other ranks compute parts of the model, and wait for this one.
        """
        self._forward = forward
        self._cache = cache
        self._sampler = sampler
        self._last_tokens = last_tokens
        self._recordings = recordings
        self._is_divided = is_divided
        self._device = cache.devices[0]
        # With rows under grammars. Whoever launched them lets go of them once their results are read, or given up.
        self._masked: list[weakref.ref[Launch]] = []

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launch:
        """Performs the plan's copies and scrubs, and starts all of its steps, which write keys and values to the slots.

        If memory runs out, the launch ends at once, and its results say what happens to its rows.
        """
        begin = time.perf_counter()
        with on_device(self._device):
            self._cache.perform(plan.jobs)
            outputs = self._try(plan)
            if outputs is None:  # everything that it allocated is free by now
                torch.cuda.empty_cache()
            launch = Launch(plan, outputs, Arrival.mark(self._device), begin, self._cache.states is None)
        if outputs is not None and outputs.masks is not None:
            self._masked = [*(each for each in self._masked if each() is not None), weakref.ref(launch)]
        return launch

    @torch.inference_mode()
    def logits(self, plan: StepPlan, places: slice) -> torch.Tensor:
        """Computes a plan of one step without sampling: float32 `[N, vocab]`, after those of its tokens, in order."""
        assert plan.reservation is not None, "the books do not know of this plan"
        with on_device(self._device):
            self._cache.perform(plan.jobs)
            inputs = self._cache.view(plan.reservation)
            tokens = to_device(input_ids(plan.rows), torch.int64, self._device)
            hidden = self._forward.hidden(first_batch(plan, self._device), tokens, inputs[0])
            return self._forward.logits(hidden[places]).float()

    def record_missing(self) -> bool:
        """See `Recordings`."""
        return self._recordings is not None and self._recordings.record_missing()

    @torch.inference_mode()
    def perform(self, jobs: Sequence[Job]) -> None:
        """Performs copies and scrubs that precede the next plan."""
        with on_device(self._device):
            self._cache.perform(jobs)

    def count_bytes(self, num_tokens: int, *, has_state: bool = False) -> int:
        """Counts the bytes that `copy_out` copies of so many tokens."""
        return count_bytes(self._cache, num_tokens, has_state=has_state)

    def copy_out(self, tokens: SlotRange) -> TokenBytes:
        """Copies tokens of a slot to the host, after all work so far. Pending jobs must have been performed."""
        with on_device(self._device):
            return copy_out(self._cache, tokens)

    def _try(self, plan: StepPlan) -> _Outputs | None:
        """None if memory runs out; with several ranks, that raises torch.OutOfMemoryError instead."""
        try:
            self._last_tokens.begin(plan.rows)
            places = Places.of(plan)
            steps = None if self._recordings is None else self._recordings.load(plan, places)
            return self._compute(plan, places) if steps is None else self._replay(plan, places, steps)
        except torch.OutOfMemoryError as error:
            if self._is_divided:
                raise
            logger.error("a step of %d rows ran out of memory: %s", len(plan.rows), str(error))
            return None

    def _replay(self, plan: StepPlan, places: Places, steps: Steps) -> _Outputs:
        """Replays recorded steps. The device computes the first while the host prepares sampling."""
        steps.compute()
        return self._sample_steps(plan, places, steps, self._prepare_sampling(plan, places))

    def _compute(self, plan: StepPlan, places: Places) -> _Outputs:
        """Runs any plan operator by operator. Masks of grammars are computed while the operators are launched."""
        steps = OperatorSteps(self._forward, self._cache, self._last_tokens, plan, places)
        sampling = self._prepare_sampling(plan, places)
        steps.compute()
        return self._sample_steps(plan, places, steps, sampling)

    def _sample_steps(
        self, plan: StepPlan, places: Places, steps: Steps, sampling: SamplingBatch | GraphSampling
    ) -> _Outputs:
        """Samples the first step, which has begun, and runs and samples the others."""
        hidden = steps.hidden
        results = None if hidden is None else PendingResults(plan.rows, hidden, self._forward.logits)
        sampled: list[Sampled] = []
        for step in range(plan.num_steps):
            if step:
                steps.compute()
            if places.rows:
                sampled.append(self._sample(steps.logits(), sampling, step, steps.slots))
        return _Outputs.gather(sampled, sampling if isinstance(sampling, SamplingBatch) else None, results)

    def _prepare_sampling(self, plan: StepPlan, places: Places) -> SamplingBatch | GraphSampling:
        """For a graph, if there are any and the places need no more than these offer."""
        rows = [plan.rows[index] for index in places.rows]
        if self._recordings is not None and not places.guessed:
            by_graph = prepare_graph_sampling(rows, plan.num_steps)
            if by_graph is not None:
                return by_graph
        return self._sampler.prepare(rows, plan.num_steps, places.guessed)

    def _sample(
        self, logits: torch.Tensor, sampling: SamplingBatch | GraphSampling, step: int, slots: torch.Tensor
    ) -> Sampled:
        if isinstance(sampling, GraphSampling):
            assert self._recordings is not None, "it was prepared for them"
            if step == 0:
                self._recordings.sampling.load(slots, sampling)
            return Sampled(self._recordings.sampling.sample(logits), None)
        if sampling.masks is not None and sampling.masks.pending:
            for reference in self._masked:
                if (launch := reference()) is not None:
                    launch.wait()
        sampled = self._sampler.sample(logits, sampling, step)
        self._last_tokens.note(slots, sampled.tokens)
        return sampled


def _results_by_row(plan: StepPlan, outputs: _Outputs) -> list[RowResult]:
    """Each row's results, from outputs that have reached the host. Grammars take their tokens before this returns."""
    sampled = [] if outputs.tokens is None else outputs.tokens.tolist()
    masks = outputs.masks
    logprobs = iter(_logprobs_by_place(outputs))
    prompt_results = {} if outputs.prompt_results is None else outputs.prompt_results.to_host()
    results = []
    sampled_at: dict[int, RowResult] = {}  # by the place of its first token
    place = 0
    for index, row in enumerate(plan.rows):
        end = place + (1 + len(row.guess) if row.is_sampled else 0)
        drawn = [token for steps in sampled[place:end] for token in steps]
        own = drawn if masks is None else masks.in_time(place, drawn)
        own = up_to_wrong(own, row.guess) if row.guess else own
        wants_logprobs = row.is_sampled and row.key.params.logprobs is not None
        found = prompt_results.get(index)
        error = _NOT_FINITE if found is not None and not found.is_sound else None
        result = RowResult(
            token_ids=list(takewhile(lambda token: token != INVALID_TOKEN, own)),
            logprobs=[each for _ in range(place, end) for each in next(logprobs)] if wants_logprobs else [],
            prompt_result=found,
            error=_NOT_A_NUMBER if INVALID_TOKEN in own else error,
            has_bad_surplus=INVALID_TOKEN in drawn,
        )
        results.append(result)
        if row.is_sampled:
            sampled_at[place] = result
        place = end
    if masks is not None:
        _show_to_grammars(sampled_at, masks)
    return results


def _show_to_grammars(results: Mapping[int, RowResult], masks: PendingMasks) -> None:
    """`results`: by place. Has the grammars take the tokens, and records errors and rows that are late."""
    masks.consume({place: result.token_ids for place, result in results.items()})
    for place, result in results.items():
        if result.error is not None:
            result.error = masks.error_of(place) or result.error
            result.stop_reason = masks.stop_reason_of(place)
        result.is_late = place in masks.late


def _results_without_memory(plan: StepPlan, *, is_repeatable: bool) -> list[RowResult]:
    """Decode rows are computed again without the others, which end with an error; so do all if there are no others."""
    failed = RowResult(error=_NO_MEMORY, has_bad_surplus=True)
    num_repeated = plan.num_decode_rows if is_repeatable and not plan.is_decode else 0
    return [
        RowResult(is_late=True) if index < num_repeated and not row.guess else failed
        for index, row in enumerate(plan.rows)
    ]


def _logprobs_by_place(outputs: _Outputs) -> list[list[TokenLogprobs]]:
    """Log-probabilities of each step, for each place that asked for them."""
    if outputs.logprobs is None or outputs.sampling is None:
        return []
    num_top = outputs.sampling.num_top_logprobs
    positions = outputs.logprobs.to_host(num_top * (len(outputs.logprobs.tokens) // len(num_top)))
    return [positions[place :: len(num_top)] for place in range(len(num_top))]
