"""The step being planned: which sequences, how many tokens of each, and at last the plan."""

from dataclasses import replace

from chairlift.plan import COMPUTE, ON_DEVICE, RowPlan, StepPlan
from chairlift.scheduler.drafting import Guess
from chairlift.scheduler.placement import Placement
from chairlift.scheduler.request import RequestState

_UNKNOWN = (ON_DEVICE,)


def share_of(num_tokens: int) -> int:
    """The part of a step's tokens reserved for the prompt begun first, or for waiting ones, so that none starves."""
    return -(-num_tokens // 4)


class NextStep:
    """The step being planned, and the number of tokens it may still compute. Used by one call of `schedule`."""

    def __init__(self, num_tokens: int) -> None:
        self.num_left = num_tokens
        self.decode: list[RequestState] = []
        self.guessing: list[tuple[RequestState, Guess]] = []
        self._chunks: dict[RequestState, int] = {}  # prompts' tokens in this step

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens that are planned."""
        return sum(self._chunks.values())

    def add_prompt(self, request: RequestState, num_kept: int = 0) -> None:
        """Plans more of the request's uncomputed tokens, as many as leave `num_kept` tokens of the budget."""
        num_planned = self._chunks.get(request, 0)
        num_new = min(request.num_uncomputed - num_planned, self.num_left - num_kept)
        if request.state_marks:
            num_new = request.end_at_mark(num_planned + num_new) - num_planned
        if num_new > 0:
            self.num_left -= num_new
            self._chunks[request] = num_planned + num_new

    def go_on(self, begun: list[RequestState], placement: Placement, num_kept: int) -> None:
        """Adds chunks of prompts that have slots and wait for nobody; leaves `num_kept` tokens of the budget.

        The prompt begun first gets its share in any case. Then prompts come by priority, and within a priority by the
        fewest tokens to compute.
        """
        if not self.num_left:
            return
        for request in begun:
            if request.leader is not None:
                placement.follow(request)
        ready = [request for request in begun if request.is_ready and request.num_uncomputed]
        for request in ready[:1]:
            self.add_prompt(request, self.num_left - share_of(self.num_left))
        for request in sorted(ready, key=lambda each: (each.options.priority, each.num_uncomputed)):
            self.add_prompt(request, num_kept)

    def finish(self, max_steps: int, max_seq_len: int) -> StepPlan:
        """The plan: of at most `max_steps` steps, fewer if a slot lacks room for them or all rows end sooner."""
        num_steps = 1
        if max_steps > 1 and self.decode and not self.guessing:
            room = max_seq_len - max(request.num_computed for request in self.decode)
            num_remaining = [request.num_remaining for request in self.decode]
            # A recurrent state cannot come back from beyond the last token of its sequence.
            wanted = min(num_remaining) if self.decode[0].is_recurrent else max(num_remaining)
            num_steps = max(1, min(max_steps, room, wanted))  # none is wanted after a prompt that is only scored
        decode = [decode_row(request) for request in self.decode]
        guessing = [_guessing_row(request, guess) for request, guess in self.guessing]
        chunks = [_chunk(request, num_new) for request, num_new in self._chunks.items()]
        expected = [num_steps] * len(decode) + [len(row.input_ids) for row in guessing]
        expected += [num_steps if row.work.is_sampled else 0 for row in chunks]
        return StepPlan((*decode, *guessing, *chunks), len(decode), num_steps, tuple(expected))


def decode_row(request: RequestState) -> RowPlan:
    assert request.slot is not None, f"{request.request_id} is planned without a slot"
    num_known, num_pending = len(request.token_ids), request.num_pending
    input_ids = _UNKNOWN if num_pending else request.token_ids[-1:]
    num_output = num_known + num_pending - request.num_prompt_tokens
    row = RowPlan(request.key, request.slot, request.num_computed, input_ids, num_output, request.work_to_sample())
    if request.is_recurrent:
        row.num_tentative = request.num_tentative()
    return row


def _guessing_row(request: RequestState, guess: Guess) -> RowPlan:
    row = decode_row(request)
    row.input_ids, row.guess = (*row.input_ids, *guess.tokens), guess.tokens
    row.num_tentative = request.num_tentative(len(guess.tokens))
    request.guess = guess
    request.has_counts = False  # only the host knows which of the tokens count, so the counts begin again
    return row


def _chunk(request: RequestState, num_new: int) -> RowPlan:
    """A part of a prompt, or of what a preempted sequence computes again."""
    assert request.slot is not None, f"{request.request_id} is planned without a slot"
    if request.state_marks:  # some may be newer than the plan for its tokens
        num_new = request.end_at_mark(num_new)
    start, end = request.num_computed, request.num_computed + num_new
    is_last = num_new == request.num_uncomputed
    work = request.work_to_sample() if is_last and not request.is_prompt_only else COMPUTE
    if (part := request.part_of_task(start, num_new)) is not None:
        work = replace(work, part=part)
    row = RowPlan(request.key, request.slot, start, request.token_ids[start:end], request.num_output_tokens, work)
    if request.is_recurrent and is_last:
        row.num_tentative = max(min(request.prompt_tail, num_new), request.num_tentative())
    return row
