"""Steps with prompts in them that are recorded once and replayed, as `graphs` does with decode steps.

    tokens   | d0 | d1 | p2 p2 p2 | p3 p3 | pad pad |        padded to one of a few sizes
    rows       0    1       2         3        4             decode rows, prompts, and the padding; empty ones follow

A step differs from others in its tokens, rows and lengths, and in the border between decode rows and prompts. All of
these are numbers in one buffer, which one copy from the host fills. The graph computes from them where each token
belongs, and attention takes the border as data (`PaddedBatch`). All padding is one row of the scratch slot, so that
nothing reads memory that was never written.

A graph suffices for so many tokens and so many decode rows. Its prompts are few, because kernels start as many blocks
of threads for each of them as if it had all tokens.
"""

from array import array
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

import torch

from chairlift.cache import ContinuousBatchingKVCacheCollection
from chairlift.config import ResolvedConfig
from chairlift.device import send
from chairlift.engine.execution.recorded_steps import GraphParts, state_counts
from chairlift.engine.execution.recorder import GraphKey, GraphTable, Replay
from chairlift.engine.sampling import Places
from chairlift.models.attention import Forward, PaddedBatch, PaddedForward
from chairlift.plan import StepPlan

# Tokens of a step. More of them keep a GPU busy for longer than the host needs to launch their kernels one by one.
_SIZES = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
_COMMON_SIZES = frozenset({64, 128, 256, 512, 1024, 2048})  # recorded at start, as is the largest
_DECODE_ROWS = (0, 32)  # or as many as there can be
_FEWEST_PROMPTS, _MOST_PROMPTS, _MOST_TOKENS_TIMES_PROMPTS = 8, 32, 16384


def padded_sizes(max_num_tokens: int, slot_len: int) -> list[int]:
    """Sizes that steps of up to so many tokens are padded to; what is added always fits into a slot.

    They end below `max_num_tokens` if that is large, or slots are short.
    """
    largest = min(max_num_tokens, _SIZES[-1])
    sizes = sorted({*(size for size in _SIZES if size < largest), largest, min(slot_len, largest, _SIZES[0])})
    gaps = [size - below for size, below in zip(sizes, (0, *sizes), strict=False)]
    return sizes[: next((index for index, gap in enumerate(gaps) if gap > slot_len), len(sizes))]


def max_prompts(size: int) -> int:
    """Rows with prompts that a graph of so many tokens has."""
    return max(_FEWEST_PROMPTS, min(_MOST_PROMPTS, _MOST_TOKENS_TIMES_PROMPTS // size))


@dataclass(frozen=True, slots=True)
class MixedSteps:
    """A launch of one step, as `Steps`. What it computes is valid until the next replay."""

    hidden: torch.Tensor  # [T, hidden]
    places: torch.Tensor  # int32 [N]: tokens after which one is sampled
    slots: torch.Tensor  # int32 [N]: of these tokens
    _replay: Replay
    _forward: Forward

    def compute(self) -> None:
        """Replays the step."""
        self._replay()

    def logits(self) -> torch.Tensor:
        """Computes the logits of the places, `[N, vocab]`, which no graph does."""
        return self._forward.logits(self.hidden[self.places])


class _Buffers:
    """Holds the numbers of a step, all in one tensor, and its result. Row and token counts are the largest ones."""

    def __init__(self, max_rows: int, max_tokens: int, scratch: int, device: torch.device) -> None:
        self.num_rows = max_rows + _MOST_PROMPTS + 1  # a graph looks at so many from the border on
        self._max_rows, self._scratch = max_rows, scratch
        of_rows = [self.num_rows + 1, self.num_rows, self.num_rows, 2 * self.num_rows]
        lengths = [1, *of_rows, max_rows, max_rows, max_tokens]
        with torch.device(device):
            self._all = torch.zeros(sum(lengths), dtype=torch.int32)
            self.indices = torch.arange(max(max_tokens, self.num_rows + 1), dtype=torch.int32)
        parts = torch.split(self._all, lengths)
        self.border, self.offsets, self.slots, self.lengths, counts, *of_tokens = parts
        self.counts = counts.view(2, -1)  # see `SlotStates`
        self.places, self.place_slots, self.input_ids = of_tokens

    def load(self, plan: StepPlan, sampled: Places, size: int) -> None:
        """Starts the copy of a step's numbers. The row after its own has what is missing to `size` tokens."""
        rows, num_missing = plan.rows, self.num_rows - len(plan.rows)
        numbers = array("i", [plan.num_decode_rows])
        numbers.extend(accumulate(plan.num_new_tokens, initial=0))
        numbers.extend([size] * num_missing)
        numbers.extend(row.slot for row in rows)
        numbers.extend([self._scratch] * num_missing)
        numbers.extend(row.start for row in rows)
        numbers.extend([0] * num_missing)
        for counts in state_counts(plan):
            numbers.extend(counts)
            numbers.extend([0] * (self.num_rows - len(counts)))
        numbers.extend(sampled.tokens)
        numbers.extend([0] * (self._max_rows - len(sampled.tokens)))
        numbers.extend(rows[index].slot for index in sampled.rows)
        numbers.extend([self._scratch] * (self._max_rows - len(sampled.rows)))
        num_before = len(numbers)
        for row in rows:
            numbers.extend(row.input_ids)
        numbers.extend([0] * (num_before + size - len(numbers)))
        sent = send(torch.frombuffer(numbers, dtype=torch.int32), self._all.device)
        self._all[: len(sent)] = sent

    def clear(self, size: int, slot_len: int) -> None:
        """Makes all `size` tokens padding, in rows that each fit into the scratch slot."""
        self._all.zero_()
        self.offsets[:] = (self.indices[: len(self.offsets)] * slot_len).clamp(max=size)
        self.slots.fill_(self._scratch)


class MixedGraphs:
    """Runs steps that have prompts in them, as far as there are graphs for them."""

    def __init__(self, parts: GraphParts) -> None:
        assert isinstance(parts.forward, PaddedForward), "see find_obstacle"
        self._forward = parts.forward
        self._blocks, self._places, self._states = parts.blocks, parts.places, parts.states
        self._last_tokens, self._recorder = parts.last_tokens, parts.recorder
        self._records_common, self._is_divided = parts.records_common, parts.is_divided
        self._scratch, self._slot_len = len(self._blocks) - 1, self._blocks.shape[3]
        self._sizes = padded_sizes(parts.max_num_tokens, self._slot_len)
        max_rows = self._scratch
        self._decode_rows = [*(count for count in _DECODE_ROWS if count < max_rows), max_rows]
        self._buffers = _Buffers(max_rows, self._sizes[-1], self._scratch, self._blocks.device)
        self._hidden = self._forward.new_hidden(self._sizes[-1])
        self.graphs = GraphTable(self._record, "tokens")  # by tokens and decode rows

    @classmethod
    def find_obstacle(cls, forward: Forward) -> str | None:
        """See `RecordedSteps`."""
        if isinstance(forward, PaddedForward) and forward.can_pad:
            return None
        return "only decode steps are recorded: attention or other layers need numbers of a prompt on the host"

    @classmethod
    def num_kept_tokens(cls, config: ResolvedConfig) -> int:
        """See `RecordedSteps`."""
        return padded_sizes(config.max_num_batched_tokens, config.slot_len)[-1]

    @classmethod
    def num_scratch_tokens(cls, config: ResolvedConfig) -> int:
        """See `RecordedSteps`."""
        return config.slot_len

    @torch.inference_mode()
    def record_common(self) -> None:
        """Records the graphs that most steps will need.

        Those for which there is no memory are done without, unless other ranks must have the same ones: then
        torch.OutOfMemoryError.
        """
        common = _COMMON_SIZES if self._records_common else frozenset()
        for size in reversed(self._sizes):  # the largest first, so that smaller ones fit into its memory
            if size not in common and size != self._sizes[-1]:
                continue
            for count in reversed(self._decode_rows):
                if self._is_divided:
                    self.graphs.record(size, count)
                elif not self.graphs.try_to_record(size, count):
                    break

    def load(self, plan: StepPlan, places: Places) -> MixedSteps | None:
        """Fills the buffers for a plan of one step; see `RecordedSteps`."""
        if plan.is_decode or plan.num_steps > 1 or places.guessed:
            return None
        num_tokens, num_decode = sum(plan.num_new_tokens), plan.num_decode_rows
        key = self._find(num_tokens, num_decode, len(plan.rows) - num_decode)
        if key is None:
            return None
        buffers, num_places = self._buffers, len(places.tokens)
        buffers.load(plan, places, key.size)
        sampled = buffers.places[:num_places], buffers.place_slots[:num_places]
        return MixedSteps(self._hidden[:num_tokens], *sampled, self.graphs.replay_of(key), self._forward)

    def _find(self, num_tokens: int, num_decode: int, num_prompts: int) -> GraphKey | None:
        if num_tokens > self._sizes[-1] or num_prompts > _MOST_PROMPTS:
            return None
        size = self._sizes[bisect_left(self._sizes, num_tokens)]
        if num_prompts > max_prompts(size):
            return None
        key = self.graphs.find_key(size, self._decode_rows[bisect_left(self._decode_rows, num_decode)])
        if key is None or num_prompts > max_prompts(key.size) or key.size - num_tokens > self._slot_len:
            return None
        return key

    def _record(self, size: int, max_decode_rows: int) -> Replay:
        self._buffers.clear(size, self._slot_len)  # recording may run it
        return self._recorder.record(lambda: self._step(size, max_decode_rows))

    def _step(self, size: int, max_decode_rows: int) -> None:
        """The work of a graph."""
        batch = self._batch(size, min(max_decode_rows, size))
        input_ids = self._last_tokens.fill_in(self._buffers.input_ids[:size].long(), batch.token_slots)
        self._hidden[:size] = self._forward.padded_hidden(batch, input_ids, self._collection(batch))

    def _collection(self, batch: PaddedBatch) -> ContinuousBatchingKVCacheCollection:
        """The buffers' rows as cache inputs."""
        buffers, states = self._buffers, self._states
        has_ended = self._last_tokens.have_ended(buffers.slots)
        if has_ended is not None:
            buffers.counts[1].masked_fill_(has_ended, 1)
        return ContinuousBatchingKVCacheCollection(
            blocks=self._blocks,
            cache_lengths=buffers.lengths,
            lookup_table=buffers.slots,
            is_cache_empty=False,
            max_seq_length=batch.max_new_tokens,
            max_cache_length=self._slot_len,
            places=self._places,
            states=None if states is None else states.view_recorded(buffers.counts),
        )

    def _batch(self, size: int, max_decode_rows: int) -> PaddedBatch:
        """Computes on the device where the step in the buffers has its tokens."""
        buffers = self._buffers
        tokens, border, num_prompts = buffers.indices[:size], buffers.border, max_prompts(size)
        rows = torch.searchsorted(buffers.offsets[1:], tokens, right=True)  # int64 [T]: of each token
        positions = buffers.lengths[rows] + tokens - buffers.offsets[rows]
        decodes = tokens[:max_decode_rows] < border
        prompts = border + buffers.indices[: num_prompts + 1]  # the padding is one of them
        prompt_offsets = buffers.offsets[border + buffers.indices[: num_prompts + 2]]
        return PaddedBatch(
            token_slots=buffers.slots[rows].long(),
            positions=positions.long(),
            decodes=decodes,
            decode_slots=torch.where(decodes, buffers.slots[:max_decode_rows], self._scratch),
            decode_lengths=torch.where(decodes, buffers.lengths[:max_decode_rows] + 1, 1),
            prompt_offsets=prompt_offsets,
            prompt_slots=buffers.slots[prompts],
            prompt_lengths=buffers.lengths[prompts] + prompt_offsets.diff(),
            max_new_tokens=min(size, self._slot_len),
            planes=None if self._places is None else tuple(-1 if each is None else each.plane for each in self._places),
            row_offsets=buffers.offsets,
        )
