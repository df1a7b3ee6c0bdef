"""Slots of which not all can be full: who holds how much memory, and what is given back for whom."""

import pytest

from chairlift.cache.budget import CacheUse
from chairlift.cache.ledger import Scrub, SlotLedger


def ledger_of(num_chunks: int, num_slots: int = 4, max_seq_len: int = 256) -> SlotLedger:
    return SlotLedger(num_slots, max_seq_len, 64 * num_chunks)


def write(ledger: SlotLedger, slot: int, num_tokens: int) -> None:
    ledger.commit([num_tokens], ledger.reserve([slot], [num_tokens]))


def use_of(ledger: SlotLedger) -> tuple[int, int, int]:
    """Chunks that are held by claimed slots, by warm ones, and by none."""
    ledger.check()
    use = ledger.budget.use
    return use.num_running // 64, use.num_warm // 64, use.num_free // 64


def test_a_claimed_slot_holds_nothing_until_it_is_written() -> None:
    ledger = ledger_of(8)
    slot, other = ledger.claim(2)
    assert use_of(ledger) == (0, 0, 8)
    write(ledger, slot, 1)
    assert use_of(ledger) == (1, 0, 7)
    write(ledger, slot, 63)
    assert use_of(ledger) == (1, 0, 7)
    write(ledger, slot, 1)
    write(ledger, other, 129)
    assert use_of(ledger) == (5, 0, 3)


def test_what_was_asked_for_is_held_before_it_is_written() -> None:
    ledger = ledger_of(8)
    (slot,) = ledger.claim(1)
    assert ledger.hold(slot, 200) == 0
    assert (use_of(ledger), ledger.budget.limits[slot]) == ((4, 0, 4), 256)
    assert ledger.hold(slot, 10) == 0
    assert use_of(ledger) == (4, 0, 4)  # nobody asks for less


def test_a_slot_that_is_given_back_holds_what_stays_valid() -> None:
    ledger = ledger_of(8)
    slot, other = ledger.claim(2)
    write(ledger, slot, 200)
    write(ledger, other, 64)
    ledger.release(slot, 100)
    ledger.release(other)
    assert use_of(ledger) == (0, 2, 6)
    ledger.claim_slot(slot, 60)
    assert use_of(ledger) == (1, 0, 7)


def test_memory_stays_where_it_was_until_it_is_wanted_elsewhere() -> None:
    ledger = ledger_of(4)
    first, second = ledger.claim(2)
    write(ledger, first, 256)
    ledger.release(first)
    assert list(ledger.owed) == []
    write(ledger, second, 64)
    assert list(ledger.owed) == [Scrub(first, 0, 256)]  # 16 chunks at a time, or all that there are
    write(ledger, second, 192)
    assert list(ledger.owed) == [Scrub(first, 0, 256)]


def test_of_a_warm_slot_the_rest_is_given_back_when_memory_is_wanted() -> None:
    ledger = ledger_of(5)
    first, second = ledger.claim(2)
    write(ledger, first, 256)
    ledger.release(first, 70)
    write(ledger, second, 150)
    assert list(ledger.owed) == [Scrub(first, 128, 256)]
    assert use_of(ledger) == (3, 2, 0)


def test_what_warm_slots_must_give_up_is_said_and_nothing_changes() -> None:
    ledger = ledger_of(5)
    first, second = ledger.claim(2)
    write(ledger, first, 200)
    ledger.release(first, 200)
    assert ledger.hold(second, 190) == 128
    assert use_of(ledger) == (0, 4, 1)
    ledger.shrink_warm(first, 128)
    assert ledger.hold(second, 190) == 0
    assert (use_of(ledger), list(ledger.owed)) == ((3, 2, 0), [Scrub(first, 128, 256)])
    assert ledger.warm == {first: 128}


def test_a_warm_slot_that_keeps_nothing_is_free() -> None:
    ledger = ledger_of(5)
    (slot,) = ledger.claim(1)
    write(ledger, slot, 10)
    ledger.release(slot, 10)
    ledger.shrink_warm(slot, 0)
    assert (ledger.num_free, use_of(ledger)) == (4, (0, 0, 5))
    with pytest.raises(ValueError, match=r"slots \[0\] are not warm"):
        ledger.shrink_warm(slot, 0)


def test_rows_for_which_there_is_no_memory_are_refused_all_or_none() -> None:
    ledger = ledger_of(5)
    slots = ledger.claim(3)
    write(ledger, slots[0], 256)
    with pytest.raises(ValueError, match=r"slot 1, 2: there is no memory for more tokens: 256 of 320 are held by cl"):
        ledger.reserve(slots[1:], [64, 1])
    assert use_of(ledger) == (4, 0, 1)
    ledger.reserve(slots[1:2], [64])
    assert use_of(ledger) == (5, 0, 0)


def test_further_steps_need_memory_too() -> None:
    ledger = ledger_of(4)
    (slot,) = ledger.claim(1)
    write(ledger, slot, 63)
    ledger.reserve([slot], [1], num_steps=2)
    assert use_of(ledger) == (2, 0, 2)


def test_a_copy_needs_memory_of_its_own() -> None:
    ledger = ledger_of(4, max_seq_len=192)
    first, second = ledger.claim(2)
    write(ledger, first, 192)
    with pytest.raises(ValueError, match="slot 1: there is no memory"):
        ledger.copy_prefix(first, second, 65)
    ledger.copy_prefix(first, second, 64)
    assert use_of(ledger) == (4, 0, 0)


def test_all_that_nobody_holds_can_be_given_back() -> None:
    ledger = ledger_of(16)
    slots = ledger.claim(3)
    for slot in slots:
        write(ledger, slot, 200)
    ledger.release(slots[0])
    ledger.release(slots[1], 64)
    ledger.give_back()
    assert list(ledger.owed) == [Scrub(slots[1], 64, 256), Scrub(slots[0], 0, 256)]
    ledger.give_back()
    assert len(ledger.owed) == 2
    assert use_of(ledger) == (4, 1, 11)


def test_a_budget_that_no_full_slot_fits_into_is_refused() -> None:
    assert SlotLedger(4, 100, 128).budget.use == CacheUse(num_tokens=128)
    with pytest.raises(ValueError, match="a cache of 127 tokens cannot hold a sequence of 100 tokens in chunks of 64"):
        SlotLedger(4, 100, 127)
    assert SlotLedger(4, 100).budget.use == CacheUse(num_tokens=512)  # without budget: all that fits
