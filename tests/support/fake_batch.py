"""An engine without a model, for whatever looks at one: requests come, wait, are prefilled, decode and leave."""

import random
from collections import Counter, deque
from dataclasses import dataclass

from chairlift.engine.journal import (
    MAX_LAUNCHES_SHOWN,
    MAX_WAITING_SHOWN,
    LaunchRecord,
    SlotSnapshot,
    SlotState,
    Snapshot,
    Totals,
    WaitingSnapshot,
    short_id,
)


@dataclass(slots=True)
class FakeRequest:
    """A prompt of that length, of which `num_reused` tokens need not be computed, and the tokens it wants.

    `num_restored` of its first tokens came from disk; `num_states` recurrent states are kept along its tokens.

    Each step brings it one token, and `num_guessed` more.
    """

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_reused: int = 0
    arrival: float = 0.0
    num_guessed: int = 0
    num_computed: int = 0
    num_generated: int = 0
    num_accepted: int = 0
    num_restored: int = 0
    num_states: int = 0

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.num_prompt_tokens

    def slot(self) -> SlotSnapshot:
        return SlotSnapshot(
            state=SlotState.PREFILLING if self.is_prefilling else SlotState.DECODING,
            request_id=short_id(self.request_id),
            num_reused=self.num_reused,
            num_computed=self.num_computed,
            num_prompt_tokens=self.num_prompt_tokens,
            num_tokens=self.num_prompt_tokens + self.num_generated,
            num_accepted=self.num_accepted,
            num_restored=self.num_restored,
            num_states=self.num_states,
        )


class FakeBatch:
    """A `SnapshotSource` with a clock of its own, which only `step` moves.

    A step costs a fixed time and some for each token. `crowd` makes up requests, the same ones for the same seed.
    """

    def __init__(self, num_slots: int = 4, slot_len: int = 2048, token_budget: int = 512, seed: int = 0) -> None:
        self.slot_len, self.time, self.num_finished = slot_len, 0.0, 0
        self.waiting: deque[FakeRequest] = deque()
        self.running: dict[int, FakeRequest] = {}
        self._num_slots, self._token_budget = num_slots, token_budget
        self._warm: dict[int, FakeRequest] = {}  # slot -> the request whose tokens are in it
        self._launches: deque[LaunchRecord] = deque(maxlen=MAX_LAUNCHES_SHOWN)
        self._num_launches = self._num_added = 0
        self._counts: Counter[str] = Counter()  # by their names in `Totals`
        self._seconds_to_first_token = 0.0
        self._random = random.Random(seed)

    async def read_snapshot(self) -> Snapshot:
        waiting = [
            WaitingSnapshot(short_id(each.request_id), each.num_prompt_tokens, round(self.time - each.arrival, 3))
            for each in list(self.waiting)[:MAX_WAITING_SHOWN]
        ]
        seconds = self._seconds_to_first_token
        return Snapshot(
            time=self.time,
            slot_len=self.slot_len,
            slots=tuple(self._slot(index) for index in range(self._num_slots)),
            num_waiting=len(self.waiting),
            waiting=tuple(waiting),
            num_launches=self._num_launches,
            launches=tuple(self._launches),
            totals=Totals(num_finished=self.num_finished, seconds_to_first_token=seconds, **self._counts),
        )

    def add(self, num_prompt_tokens: int, num_output_tokens: int, num_reused: int = 0) -> FakeRequest:
        self._num_added += 1
        name = f"fake-{self._num_added}-0-0"
        self.waiting.append(FakeRequest(name, num_prompt_tokens, num_output_tokens, num_reused, self.time))
        return self.waiting[-1]

    def crowd(self, num_requests: int) -> None:
        """Adds requests of various lengths, about half of which begin with a prompt that was seen before."""
        for _ in range(num_requests):
            num_prompt = min(int(self._random.lognormvariate(5.2, 0.7)) + 8, self.slot_len // 2 - 1)
            num_output = min(int(self._random.lognormvariate(4.9, 0.8)) + 8, self.slot_len // 2 - 1)
            self.add(num_prompt, num_output, int(self._random.choice((0.0, 0.0, 0.4, 0.8)) * num_prompt))

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def step(self) -> None:
        """One launch of one step: each running row decodes, prompts get what is left of the budget."""
        self._admit()
        decoding = [each for each in self.running.values() if not each.is_prefilling]
        prefilling = [each for each in self.running.values() if each.is_prefilling]
        budget, num_prefill = self._token_budget - len(decoding), 0
        for request in prefilling:
            chunk = min(budget - num_prefill, request.num_prompt_tokens - request.num_computed)
            request.num_computed += chunk
            num_prefill += chunk
        for request in decoding:
            request.num_generated += 1 + request.num_guessed
            request.num_computed += 1 + request.num_guessed
            request.num_accepted += request.num_guessed
            self._counts["num_generated_tokens"] += 1 + request.num_guessed
            self._counts["num_drafted_tokens"] += request.num_guessed
        seconds = round(0.006 + 2e-5 * len(decoding) + 6e-5 * num_prefill + self._random.uniform(0, 0.0015), 6)
        self.time += seconds
        for request in prefilling:
            if not request.is_prefilling:
                self._generate_first(request)
        self._launches.append(LaunchRecord(num_prefill, len(decoding), 1, seconds))
        self._num_launches += 1
        self._retire()

    def _slot(self, index: int) -> SlotSnapshot:
        if index in self.running:
            return self.running[index].slot()
        if index in self._warm:
            last = self._warm[index]
            return SlotSnapshot(
                state=SlotState.WARM,
                num_computed=last.num_computed,
                num_restored=last.num_restored,
                num_states=last.num_states,
            )
        return SlotSnapshot()

    def _admit(self) -> None:
        for index in range(self._num_slots):
            if self.waiting and index not in self.running:
                self.running[index] = request = self.waiting.popleft()
                request.num_computed = request.num_reused
                self._warm.pop(index, None)

    def _generate_first(self, request: FakeRequest) -> None:
        request.num_generated = 1
        num_prompt, num_cached = request.num_prompt_tokens, request.num_reused
        self._counts.update(num_generated_tokens=1, num_first_tokens=1)
        self._counts.update(num_prompt_tokens=num_prompt, num_cached_tokens=num_cached)
        self._seconds_to_first_token += self.time - request.arrival

    def _retire(self) -> None:
        for index, request in list(self.running.items()):
            if request.num_generated >= request.num_output_tokens:
                del self.running[index]
                self._warm[index] = request
                self.num_finished += 1
