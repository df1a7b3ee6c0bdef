"""Tests when a saved prefix is read, and when it is waited for no longer."""

from dataclasses import replace
from pathlib import Path

import pytest

from chairlift.disk.reader import Order, PrefixReader
from chairlift.engine.saved.costs import Costs
from tests.engine.support import core_of, make_llm
from tests.engine.test_poison import choices_of
from tests.engine.test_saved_prefixes import MINE, PROMPT, SCORED, answered
from tests.support.engines import HOOKED


def test_reading_pays_while_it_takes_less_time_than_computing() -> None:
    costs = Costs(seconds_per_byte=1e-9)
    assert costs.pays(num_tokens=1, num_bytes=10**12)  # as long as nothing is known of computing
    costs.note_computed(1000, 1.0)
    assert [costs.pays(1000, num_bytes) for num_bytes in (10**9 - 1, 10**9)] == [True, False]
    costs.note_computed(10, 100.0)  # so few tokens say nothing
    for _ in range(200):
        costs.note_read(10**6, 0.1)
    assert not costs.pays(1000, 10**8)


def test_what_was_saved_is_what_computing_would_have_taken_beyond_reading() -> None:
    costs = Costs(seconds_per_byte=1e-9)
    costs.note_restored(500, 0.2)
    assert costs.counts.seconds_saved == 0.0  # until it is known what computing takes
    costs.note_computed(1000, 1.0)
    costs.note_restored(500, 0.1)
    assert (costs.counts.num_reads, costs.counts.num_tokens_read) == (2, 1000)
    assert costs.counts.seconds_saved == pytest.approx(0.3 + 0.4)


def test_a_disk_that_does_not_answer_is_waited_for_as_long_as_computing_takes(
    native: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = answered(native, tmp_path)
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    orders = list[Order]()
    monkeypatch.setattr(PrefixReader, "begin", lambda _, order: orders.append(order))
    parts = replace(HOOKED, clock=clock)
    with make_llm(native, parts, prefix_cache_dir=str(tmp_path), max_seq_len=256) as llm:
        late = llm.generate([PROMPT], SCORED, options=MINE)[0]
        core_of(llm).check()
    assert (len(orders), late.num_cached_tokens) == (1, 0)
    assert choices_of([late]) == choices_of([cold])
