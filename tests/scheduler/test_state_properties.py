"""Recurrent states under everything at once: forks, guesses, late masks, aborts, preemption, and few kept states.

The fake engine asserts at every launch that a row's state has taken exactly the tokens before it; here, too, that every
request gets the answer that it would get alone.
"""

import random
from collections import Counter
from collections.abc import Sequence
from itertools import count, takewhile
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from chairlift.params import FinishReason
from chairlift.plan import Job, RowPlan, RowResult, SlotCopy, StateCopy, StepPlan
from chairlift.prompt_work import ScoreTask
from chairlift.scheduler import Policy, Speculation
from tests.scheduler.fake_engine import FakeEngine, assert_nothing_is_left

MAX_SEQ_LEN = 3200
SYSTEM = [number % 50 + 100 for number in range(2600)]


class AnyText:
    """A grammar that allows everything, and whose masks may be late."""

    is_ready = keeps_pace = True

    def foresee(self) -> None:
        """It says nothing."""

    def advance(self, token_id: int) -> bool:  # noqa: ARG002
        return False


def answer_to(prompt: Sequence[int], index: int) -> int:
    """The token of this number: runs that can be guessed, and turns that cannot."""
    return 10 + index % 3 if index % 7 else 20 + sum(prompt[-9:]) % 40


class Answering(FakeEngine):
    """An engine whose requests have one answer each, and whose masks are late now and then."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.copied: Counter[tuple[bool, bool]] = Counter()  # states, by whether source and target are snapshots
        self._random = random.Random(1)

    def begin(self, plan: StepPlan) -> None:
        super().begin(plan)
        results = self._results[-1]
        for index, row in enumerate(plan.rows):
            if row.key.grammar is not None and row.is_sampled and self._random.random() < 0.3:
                del self._said[row.key.tag][-len(results[index].token_ids) :]
                results[index] = RowResult(is_late=True)

    def _sample(self, row: RowPlan, num_steps: int) -> list[int]:
        prompt = self.requests[row.key.tag].token_ids[: row.key.num_prompt_tokens]
        expected = [answer_to(prompt, row.num_output_tokens + index) for index in range(num_steps + len(row.guess))]
        agreeing = takewhile(lambda pair: pair[0] == pair[1], zip(row.guess, expected, strict=False))
        num_right = sum(1 for _ in agreeing)
        return expected[: num_steps + num_right]

    def _perform(self, jobs: Sequence[Job]) -> list[SlotCopy]:
        slots = self.slots.num_slots
        self.copied.update((job.source >= slots, job.target >= slots) for job in jobs if isinstance(job, StateCopy))
        return super()._perform(jobs)


class States(RuleBasedStateMachine):
    """Prompts that begin alike, and next turns of conversations."""

    def __init__(self) -> None:
        super().__init__()
        self.names = count()
        self.left: set[str] = set()

    @initialize(
        num_slots=st.integers(1, 4),
        num_spare=st.integers(0, 1),
        num_snapshots=st.integers(0, 5),
        budget=st.sampled_from([60, 300, 1100, 4000]),
        num_chunks=st.none() | st.integers(50, 120),
        num_ahead=st.integers(0, 1),
        max_steps=st.sampled_from([1, 1, 3]),
        is_guessing=st.booleans(),
        preempt_after=st.none() | st.integers(1, 4),
    )
    def start(
        self,
        num_slots: int,
        num_spare: int,
        num_snapshots: int,
        budget: int,
        num_chunks: int | None,
        num_ahead: int,
        max_steps: int,
        is_guessing: bool,
        preempt_after: int | None,
    ) -> None:
        self.engine = Answering(
            num_slots + num_spare,
            budget,
            max_num_running=num_slots,
            max_seq_len=MAX_SEQ_LEN,
            num_snapshots=num_snapshots,
            cache_tokens=None if num_chunks is None else 64 * num_chunks,
            num_ahead=0 if is_guessing else num_ahead,
            max_steps=max_steps,
            speculation=Speculation(6) if is_guessing else None,
            policy=Policy(preempt_after=preempt_after),
        )

    @rule(
        length=st.sampled_from([10, 64, 70, 130, 130, 140, 1000, 2100, 2600]),
        ending=st.lists(st.integers(500, 502), max_size=40),
        num_forks=st.sampled_from([1, 1, 1, 3]),
        max_tokens=st.integers(1, 40),
        has_grammar=st.booleans(),
        fields=st.fixed_dictionaries(
            {
                "priority": st.integers(0, 1),
                "salt": st.sampled_from(["", "", "", "x"]),
                "text_may_end_early": st.booleans(),
            },
            optional={"prompt_task": st.just(ScoreTask(1))},
        ),
    )
    def arrive(
        self,
        length: int,
        ending: list[int],
        num_forks: int,
        max_tokens: int,
        has_grammar: bool,
        fields: dict[str, Any],
    ) -> None:
        self._ask([*SYSTEM[:length], *ending], num_forks, max_tokens, has_grammar, fields)

    @precondition(lambda self: any(request.finish_reason for request in self.engine.requests.values()))
    @rule(data=st.data(), num_dropped=st.integers(0, 12), max_tokens=st.integers(1, 40))
    def go_on_talking(self, data: st.DataObject, num_dropped: int, max_tokens: int) -> None:
        over = [name for name, each in self.engine.requests.items() if each.finish_reason is not None]
        before = self.engine.requests[data.draw(st.sampled_from(over))]
        kept = before.token_ids[: max(len(before.token_ids) - num_dropped, 1)]
        if len(kept) + 2 + max_tokens <= MAX_SEQ_LEN:
            self._ask([*kept, 510, 511], 1, max_tokens, False, {"salt": before.options.cache_salt})

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.engine.requests)))
        self.left.add(name)
        self.engine.abort(name)

    @rule(num_steps=st.integers(1, 12))
    def compute(self, num_steps: int) -> None:
        self.engine.steps(num_steps)

    @rule(num_steps=st.just(60))
    def compute_more(self, num_steps: int) -> None:
        self.engine.steps(num_steps)

    @rule()
    def trim(self) -> None:
        if not self.engine.has_work:
            self.engine.scheduler.placement.trim()
            self.engine.scheduler.check()

    @rule(is_crash=st.sampled_from([False, False, False, True]))
    def forget(self, is_crash: bool) -> None:
        if is_crash:
            self.left.update(request.request_id for request in self.engine.scheduler.running)
            self.engine.crash()
        else:
            self.engine.scheduler.reset_prefix_cache()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run(20_000)
        for name, request in self.engine.requests.items():
            prompt = request.token_ids[: request.num_prompt_tokens]
            answer = request.token_ids[request.num_prompt_tokens :]
            assert answer == [answer_to(prompt, index) for index in range(len(answer))]
            assert name in self.left or (request.finish_reason, len(answer)) == (
                FinishReason.LENGTH,
                request.max_tokens,
            )
        assert_nothing_is_left(self.engine.scheduler)

    def _ask(
        self, prompt: list[int], num_forks: int, max_tokens: int, has_grammar: bool, fields: dict[str, Any]
    ) -> None:
        more: dict[str, Any] = {"new_grammar": AnyText} if has_grammar else {}
        requests = [
            self.engine.ask(f"r{next(self.names)}", prompt, max_tokens, **fields, **more) for _ in range(num_forks)
        ]
        self.engine.displace(*requests)


TestStates = States.TestCase
TestStates.settings = settings(stateful_step_count=30)
