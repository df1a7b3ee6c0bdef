"""The masks of one launch: applied between its forward pass and sampling, as far as they are there in time.

A launch waits a little for the masks of all its rows together. A row whose mask is late gets no token, is skipped until
the mask is ready, and is then computed again.

A launch may begin before the host knows the tokens of the one before it. Its forward pass needs none of them, but its
masks do: so they are applied once the grammars have consumed these tokens. If one turns out not to count, the row that
goes on from it gets no token either.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Self

import torch

from chairlift.device import send, to_device
from chairlift.engine.sampling.guesses import NOTHING_GUESSED, Guessed
from chairlift.engine.sampling.masks import TokenGrammar
from chairlift.params import GRAMMAR_LIMIT
from chairlift.plan import Grammar


class PendingMasks:
    """The masks of the rows of the logits that have a grammar; a guess's rows follow that of its request."""

    def __init__(
        self,
        grammars: dict[int, TokenGrammar],
        guesses: Mapping[int, Sequence[int]],
        pending: Collection[int] = (),
    ) -> None:
        """`grammars`, `guesses`: by the first row of a request. `pending`: see `of`."""
        self._grammars = grammars
        self.pending = [row for row in grammars if row in pending]
        """Rows whose masks depend on tokens of launches before."""
        self._threads = next(iter(grammars.values())).threads
        self._begin = time.perf_counter()
        self._drafts = {row: self._threads.mask_guess(grammars[row], guess) for row, guess in guesses.items()}
        self._drafted: dict[int, Sequence[torch.Tensor]] = {}  # the masks after guessed tokens that were in time
        self.late: set[int] = set()  # rows that get no token in this launch

    @classmethod
    def of(
        cls,
        grammars: Sequence[Grammar | None],
        guessed: Guessed = NOTHING_GUESSED,
        pending: Collection[int] = (),
    ) -> Self | None:
        """`grammars`: by row. None if no row has one.

        `pending`: rows that go on from tokens which their grammars have not consumed; they must before `apply`.
        """
        constrained: dict[int, TokenGrammar] = {}
        guesses: dict[int, Sequence[int]] = {}
        first = 0
        for row, grammar in enumerate(grammars):
            if not isinstance(grammar, TokenGrammar):
                continue
            if guessed.get(row):
                guesses[first] = guessed[row]  # the last row has the whole guess
            else:
                first = row
                constrained[row] = grammar
        return cls(constrained, guesses, pending) if constrained else None

    def apply(self, logits: torch.Tensor) -> None:
        """Masks those rows of `[N, vocab]` in place with what their grammars allow. Waits for masks if needed."""
        if masks := self.gather():
            rows = to_device(list(masks), torch.int64, logits.device)
            words = send(torch.stack(list(masks.values())), logits.device)
            bits = torch.arange(32, dtype=torch.int32, device=logits.device)
            is_allowed = (words.unsqueeze(-1) >> bits & 1).flatten(1)[:, : logits.shape[1]].bool()
            logits[rows] = logits[rows].masked_fill_(~is_allowed, -torch.inf)

    def gather(self) -> dict[int, torch.Tensor]:
        """Returns what grammars allow, by row, as int32 `[words]`, a bit per token. Waits for masks if needed."""
        self.late.update(row for row in self.pending if self._grammars[row].is_stuck)
        self._settle(lambda grammar: grammar.mask is not None)
        self._threads.wait(lambda: all(draft.is_over for draft in self._drafts.values()), self._patience_s)
        masks = {row: each.mask for row, each in self._in_time()}
        self._drafted = {row: draft.masks for row, draft in self._drafts.items()}
        for row, drafted in self._drafted.items():
            masks |= dict(enumerate(drafted, row + 1))
        return {row: mask for row, mask in masks.items() if mask is not None}

    def in_time(self, row: int, drawn: list[int]) -> list[int]:
        """The tokens that count of those drawn for a request from that row on: all, or the first if masks were late."""
        return drawn if self._drafted.get(row, True) else drawn[:1]

    def consume(self, sampled: Mapping[int, list[int]]) -> None:
        """Has the grammars consume the sampled tokens, by row. Waits for them if needed."""
        new = [(grammar, list(sampled[row])) for row, grammar in self._in_time() if sampled[row]]
        self._threads.consume(pair for pair in new if not pair[0].sampled)  # a row that was late repeats its tokens
        self._settle(lambda grammar: not grammar.sampled or grammar.is_taken)
        for row, grammar in self._grammars.items():
            if row in self.late or not sampled[row]:
                grammar.is_stuck = True
            else:
                grammar.hand_over(len(sampled[row]))

    def error_of(self, row: int) -> str | None:
        """Says why no token can be sampled for a row, if its grammar is the reason."""
        grammar = self._grammars.get(row)
        return None if grammar is None or grammar.error is None else f"the grammar failed: {grammar.error}"

    def stop_reason_of(self, row: int) -> str | None:
        """GRAMMAR_LIMIT if the row's grammar turned out too costly, which the client can change."""
        grammar = self._grammars.get(row)
        return GRAMMAR_LIMIT if grammar is not None and grammar.hit_limit else None

    @property
    def _patience_s(self) -> float:
        return self._threads.patience.after(time.perf_counter() - self._begin)

    def _in_time(self) -> list[tuple[int, TokenGrammar]]:
        return [(row, grammar) for row, grammar in self._grammars.items() if row not in self.late]

    def _settle(self, is_done: Callable[[TokenGrammar], bool]) -> None:
        """Waits a little, though not for slow sequences, and records which are late."""
        rows = self._in_time()
        awaited = [grammar for _, grammar in rows if not grammar.compiled.is_slow]
        self._threads.wait(lambda: all(map(is_done, awaited)), self._patience_s)
        if not all(is_done(grammar) for _, grammar in rows):
            late = self._threads.put_off([grammar for _, grammar in rows], is_done)
            self.late.update(row for row, grammar in rows if grammar in late)
