"""Grammars in the engine: masks of the tokens allowed next, computed by a few threads during the forward pass.

Between two tokens of a sequence, its grammar takes the first one and computes the mask for the second. How long that
takes depends on the client's grammar, so none of it happens on the engine's thread, and the GIL is held for one thing
alone: a text that the grammar forces becomes tokens by a call of Python, where a guess needs them. A launch waits a
little for the masks of its rows (`pending_masks`). Sequences that are slow, by processor time rather than by the clock,
have a lane of their own, and no launch waits for them.

For rows with a guess, a copy of the matcher advances along it. If the masks after guessed tokens are late, the row gets
only the one token that does not need them.

The threads start with the first grammar that is compiled; the engine starts none.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import SimpleQueue

import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from chairlift.engine.sampling.compiled_grammar import CompiledGrammar, Patience, explain

logger = logging.getLogger(__name__)

_MAX_MASK_THREADS = 8
_MAX_FORCED = 64  # forced tokens that are reported at a time
_JOIN_TIMEOUT_S = 2.0  # for all; a thread that hangs is abandoned

_Lane = SimpleQueue[Callable[[], None] | None]
_Pair = tuple[LLMatcher, int]


class GuessMasks:
    """The masks after the tokens of a guess, while they are computed."""

    def __init__(self, guess: Sequence[int]) -> None:
        self.guess = guess
        self.masks: Sequence[torch.Tensor] = ()  # after the first token, the second, ..., up to the first forbidden one
        self.is_over = False


class TokenGrammar:
    """One sequence's state in a grammar.

    The cycle: a mask, a token sampled under it, `MaskThreads.consume`, `hand_over`, `advance`; with a guess, several
    of each. The mask for the next token may be applied before `advance`.

    After an error, the mask allows no token, so the launch that samples the next one reports the error.
    """

    def __init__(self, compiled: CompiledGrammar, threads: "MaskThreads") -> None:
        self.is_ready = True  # see `plan.Grammar`
        self.is_complete = False  # nothing can follow what was taken
        self.error: str | None = None
        self.hit_limit = False  # the error is that the grammar costs too much
        self.sampled: list[int] = []  # tokens that `MaskThreads.consume` got, and no row's result has yet
        self.is_taken = False  # the matcher has consumed them
        self.is_stuck = False  # no token can follow that of its newest row, or that row got none
        self._handed_over: deque[int] = deque()  # tokens in results, which `advance` did not get yet
        self.next_mask: torch.Tensor | None = compiled.first_mask  # None: not yet computed
        self.compiled = compiled
        self.threads = threads
        self.matcher = compiled.matcher.deep_copy()
        self.ahead: LLMatcher | None = None  # a copy of the matcher for a guess
        self._foresees = False
        self._forced: Sequence[int] = ()
        self._tokens: list[int] = []

    @property
    def mask(self) -> torch.Tensor | None:
        """The row's mask; None while it is being computed. A row that was late can only repeat its sampled token."""
        if not self.sampled:
            return self.next_mask
        mask, token = torch.zeros_like(self.compiled.first_mask), self.sampled[0]
        mask.numpy().view("uint32")[token // 32] = 1 << token % 32
        return mask

    @property
    def keeps_pace(self) -> bool:
        """See `plan.Grammar`."""
        return not self.compiled.is_slow

    def hand_over(self, num_tokens: int) -> None:
        """Records that a row's result has the first `num_tokens` of the sampled tokens, which have been consumed."""
        self._handed_over.extend(self.sampled[:num_tokens])
        del self.sampled[:num_tokens]
        self.is_stuck = self.is_complete and not self.sampled

    def foresee(self) -> Sequence[int] | None:
        """See `plan.Grammar`."""
        self._foresees = True
        return None if self.sampled or self.ahead is None else self._forced

    def advance(self, token_id: int) -> bool:
        """See `plan.Grammar`. Submits the token if `MaskThreads.consume` did not get it; waits until it is taken."""
        if not self._handed_over:
            if not self.sampled:
                self.threads.wait(lambda: self.next_mask is not None)
                self.threads.consume([(self, [token_id])])
            self.threads.wait(lambda: self.is_taken)
            self.hand_over(len(self.sampled))
        if (taken := self._handed_over.popleft()) != token_id:
            raise ValueError(f"token {taken} had been taken, not {token_id}")
        if self._handed_over or self.sampled:
            return False
        if self.compiled.is_slow:  # without the mask, a launch would compute the row in vain
            self.threads.put_off([self], lambda each: each.next_mask is not None)
        return self.is_complete

    @property
    def has_broken_lexer(self) -> bool:
        """Returns true if the shared lexer is broken, perhaps by another sequence."""
        return self.matcher.is_error() and "lexer error" in self.matcher.get_error()

    def consume_sampled(self, consume: Callable[[list[_Pair]], object]) -> None:
        """Has the matcher consume the sampled tokens."""
        for position, token in enumerate(self.sampled):
            consume([(self.matcher, token)])
            self.drop_surplus(position)

    def drop_surplus(self, position: int) -> None:
        """Drops the tokens sampled after that position if the text is complete there."""
        if self.matcher.is_stopped() and not self.matcher.is_error():
            del self.sampled[position + 1 :]

    def note_taken(self) -> None:
        """Records that the matcher has consumed the sampled tokens."""
        assert self.sampled, "tokens are taken once"
        self._tokens += self.sampled
        self._note_error()
        self.is_complete = self.error is None and self.matcher.is_stopped()
        self._look_ahead()
        self.is_taken = True

    def begin_again(self, consume: Callable[[list[_Pair]], object]) -> None:
        """Replaces the matcher by one that shares nothing, and repeats the tokens so far."""
        self.compiled.is_broken = True
        self.matcher = self.compiled.new_matcher()
        for token in self._tokens:
            consume([(self.matcher, token)])
        if not self.is_taken and self.sampled:
            self.consume_sampled(consume)
            self.note_taken()

    def compute_mask(self) -> torch.Tensor:
        """The mask for the next token after those that were taken."""
        return self.compiled.compute_mask(self.matcher)

    def note_mask(self, mask: torch.Tensor) -> None:
        """Records the computed mask, which is empty after an error."""
        self._note_error()
        self.next_mask, self.is_ready = mask, True

    def _look_ahead(self) -> None:
        """Computes the tokens forced next with a copy of the matcher, which is then kept for a guess."""
        self.ahead = None
        is_cheap = self.compiled.is_foreseeable and not self.compiled.is_slow
        if self._foresees and is_cheap and self.error is None and not self.is_complete:
            begin = time.thread_time()
            self.ahead = self.matcher.deep_copy()
            self._forced = self.ahead.compute_ff_tokens()[:_MAX_FORCED]
            self.compiled.note_foresight(time.thread_time() - begin)

    def _note_error(self) -> None:
        if self.matcher.is_error():
            problem = explain(self.matcher.get_error())
            self.error, self.hit_limit = problem.reason, problem.is_limit


def _token_consumer(tokenizer: LLTokenizer) -> Callable[[list[_Pair]], object]:
    """Has matchers consume tokens without the GIL, which llguidance offers only for two or more at once."""
    executor = LLExecutor(num_threads=1)
    spare = LLMatcher(tokenizer, "", log_level=0)  # in an error state, so it does nothing
    return lambda pairs: executor.consume_token_par([*pairs, (spare, 0)])


class MaskThreads:
    """Threads in three lanes: one thread takes tokens, some compute masks, one does both for slow sequences."""

    def __init__(self, tokenizer: LLTokenizer, patience: Patience) -> None:
        """`patience`: of launches that need masks. RuntimeError if threads cannot be started."""
        self.patience = patience
        self._changed = threading.Condition()
        self._tokens, self._masks, self._slow = _Lane(), _Lane(), _Lane()
        num_mask_threads = max(2, min((os.cpu_count() or 1) * 4 // 5, _MAX_MASK_THREADS))
        self._lanes = [self._tokens, self._slow, *[self._masks] * num_mask_threads]
        self._threads: list[threading.Thread] = []
        try:
            self._consume, self._consume_slowly = _token_consumer(tokenizer), _token_consumer(tokenizer)
            for lane in self._lanes:
                thread = threading.Thread(target=_work, args=(lane,), name="chairlift-grammar", daemon=True)
                thread.start()
                self._threads.append(thread)
        except (RuntimeError, ValueError) as error:
            self.close()
            raise RuntimeError(f"no threads for grammars: {error}") from error

    def consume(self, sampled: Iterable[tuple[TokenGrammar, list[int]]]) -> None:
        """Starts to consume these tokens and to compute the masks after them."""
        together: list[TokenGrammar] = []
        for grammar, tokens in sampled:
            grammar.sampled, grammar.is_taken, grammar.next_mask = tokens, False, None
            if grammar.compiled.is_slow:
                self._slow.put(partial(self._try, self._go_on_alone, grammar))
            else:
                together.append(grammar)
        if together:
            self._tokens.put(partial(self._consume_together, together))

    def mask_guess(self, grammar: TokenGrammar, guess: Sequence[int]) -> GuessMasks:
        """Starts to compute the masks after the tokens of a guess, which follow those that were taken."""
        draft, matcher = GuessMasks(guess), grammar.ahead
        assert matcher is not None, "a guess was made though none can be verified"
        grammar.ahead = None
        self._masks.put(partial(self._go_ahead, grammar.compiled, matcher, draft))
        return draft

    def wait(self, is_done: Callable[[], bool], timeout: float | None = None) -> None:
        """Waits until `is_done()` is true, or for `timeout` seconds."""
        if not is_done():
            with self._changed:
                self._changed.wait_for(is_done, timeout)

    def put_off(self, grammars: Iterable[TokenGrammar], is_done: Callable[[TokenGrammar], bool]) -> set[TokenGrammar]:
        """Has unfinished rows skipped until their masks are ready, and returns these."""
        with self._changed:
            late = {grammar for grammar in grammars if not is_done(grammar)}
            for grammar in late:
                grammar.is_ready = grammar.next_mask is not None
        return late

    def close(self) -> None:
        """Ends the threads once their queues are empty."""
        for lane in self._lanes:
            lane.put(None)
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _consume_together(self, grammars: list[TokenGrammar]) -> None:
        for position in range(max(len(each.sampled) for each in grammars)):
            taking = [each for each in grammars if position < len(each.sampled)]
            self._consume([(each.matcher, each.sampled[position]) for each in taking])
            for grammar in taking:
                grammar.drop_surplus(position)
        for grammar in grammars:
            if grammar.has_broken_lexer:
                self._slow.put(partial(self._try, self._go_on_alone, grammar))
            else:
                grammar.note_taken()
                self._masks.put(partial(self._try, self._compute, grammar))
        self._tell()

    def _compute(self, grammar: TokenGrammar) -> None:
        begin = time.thread_time()
        mask = grammar.compute_mask()
        if grammar.has_broken_lexer:
            self._slow.put(partial(self._try, self._go_on_alone, grammar))
            return
        grammar.compiled.note_cost(time.thread_time() - begin)
        self._deliver(grammar, mask)

    def _go_ahead(self, compiled: CompiledGrammar, matcher: LLMatcher, draft: GuessMasks) -> None:
        """Computes masks along a guess. If that fails, the row gets one token, and the sequence fails later."""
        begin = time.thread_time()
        try:
            draft.masks = compiled.compute_masks(matcher, draft.guess)
        except Exception as error:
            logger.error("computing masks along a guess failed", exc_info=error)
        compiled.note_cost((time.thread_time() - begin) / (1 + len(draft.guess)))
        with self._changed:
            draft.is_over = True
            self._changed.notify_all()

    def _go_on_alone(self, grammar: TokenGrammar) -> None:
        """Takes the tokens, unless the lexer broke at them or at the mask after them, and computes the mask."""
        if not grammar.has_broken_lexer:
            grammar.consume_sampled(self._consume_slowly)
        if grammar.has_broken_lexer:
            grammar.begin_again(self._consume_slowly)
            self._tell()
            self._deliver(grammar, grammar.compute_mask())
        else:
            grammar.note_taken()
            self._tell()
            self._compute(grammar)

    def _try(self, job: Callable[[TokenGrammar], None], grammar: TokenGrammar) -> None:
        """Runs a job. If it fails, no token can be sampled for the sequence, which ends this request alone."""
        try:
            job(grammar)
        except Exception as error:
            logger.error("computing a grammar's mask failed", exc_info=error)
            grammar.error = f"{type(error).__name__}: {error}"
            grammar.is_taken = True
            self._deliver(grammar, torch.zeros_like(grammar.compiled.first_mask))

    def _deliver(self, grammar: TokenGrammar, mask: torch.Tensor) -> None:
        with self._changed:
            grammar.note_mask(mask)
            self._changed.notify_all()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _work(lane: _Lane) -> None:
    while (job := lane.get()) is not None:
        job()
