"""The books of the cache alone: reservations, the self-check, many threads at once, who holds how much memory."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from chairlift.cache import CacheFull
from chairlift.cache.budget import CacheUse
from chairlift.cache.ledger import SlotLedger
from chairlift.plan import CommonPrefix, Reservation, SavedPart, Scrub, SlotLoad


@pytest.mark.parametrize(("num_slots", "max_seq_len"), [(0, 8), (4, 0), (-1, 8)])
def test_a_ledger_without_room_is_refused(num_slots: int, max_seq_len: int) -> None:
    with pytest.raises(ValueError, match=f"{num_slots} slots of {max_seq_len}"):
        SlotLedger(num_slots, max_seq_len)


def test_a_reservation_says_where_each_row_stands_and_how_far_it_may_go() -> None:
    ledger = SlotLedger(4, 32)
    ledger.claim(3)
    ledger.commit([7], ledger.reserve([2], [7]))
    reservation = ledger.reserve([2, 0], [1, 4], num_steps=3)
    assert reservation == Reservation(ticket=reservation.ticket, seq_ids=(2, 0), lengths=(7, 0), num_reserved=(3, 6))


@pytest.mark.parametrize(
    ("valid", "said"),
    [
        ([1], "2 rows are in flight, but valid_lengths has 1"),
        ([1, 1, 1], "2 rows are in flight, but valid_lengths has 3"),
        ([4, -1], "slot 1: cannot commit -1 tokens"),
        ([4, 7], "slot 1: cannot commit 7 tokens, 6 were reserved"),
    ],
)
def test_a_refused_commit_changes_nothing_and_leaves_the_rows_in_flight(valid: list[int], said: str) -> None:
    ledger = SlotLedger(4, 32)
    reservation = ledger.reserve(ledger.claim(2), [4, 4], num_steps=3)
    with pytest.raises(ValueError, match=said):
        ledger.commit(valid, reservation)
    assert [ledger.cache_length_of(slot) for slot in (0, 1)] == [0, 0]
    ledger.commit([6, 6], reservation)
    assert [ledger.cache_length_of(slot) for slot in (0, 1)] == [6, 6]


def test_a_token_that_is_taken_back_is_read_in_no_other_slots_stead() -> None:
    ledger = SlotLedger(2, 256)
    source, target = ledger.claim(2)
    ledger.commit([128], ledger.reserve([source], [128]))
    ledger.copy_prefix(source, target, 128)
    assert ledger.reserve([target]).common_prefixes == (CommonPrefix(source, 128),)
    ledger.rewind(source)
    ledger.abandon([target])
    assert ledger.reserve([target]).common_prefixes == ()


def test_a_reservation_of_another_ledger_is_not_in_flight_here() -> None:
    ours, theirs = SlotLedger(1, 8), SlotLedger(1, 8)
    ours.claim(1)
    theirs.claim(1)
    ours.reserve([0], [5])
    with pytest.raises(ValueError, match="not in flight"):
        ours.commit([1], theirs.reserve([0], [5]))


DAMAGES: dict[str, Callable[[SlotLedger], object]] = {
    "a slot is forgotten": lambda ledger: ledger._free.remove(3),
    "a slot is free twice": lambda ledger: ledger._free.append(3),
    "a claimed slot is free": lambda ledger: ledger._free.append(0),
    "a slot is invented": lambda ledger: ledger._free.append(4),
    "a slot is overfull": lambda ledger: ledger._lengths.update({0: 9}),
    "a length is negative": lambda ledger: ledger._lengths.update({0: -1}),
    "a free slot is in flight": lambda ledger: ledger._in_flight.update({3: 1}),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_check_notices_damaged_books(damage: Callable[[SlotLedger], object]) -> None:
    ledger = SlotLedger(4, 8)
    ledger.claim(3)
    ledger.reserve([1])
    ledger.check()
    damage(ledger)
    with pytest.raises(AssertionError):
        ledger.check()


def race(attempt: Callable[[], object]) -> list[object]:
    """Lets eight threads make the same call at the same moment; returns what each got, or the error it met."""
    barrier = threading.Barrier(8)

    def run(_: int) -> object:
        barrier.wait()
        try:
            return attempt()
        except ValueError as error:
            return error

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(run, range(8)))


def test_of_several_threads_that_claim_reserve_commit_or_release_the_same_slot_one_succeeds() -> None:
    ledger, interval = SlotLedger(1, 8), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads give way to each other between almost any two bytecodes
    try:
        claims = race(lambda: ledger.claim(1))
        assert claims.count([0]) == sum(not isinstance(claim, CacheFull) for claim in claims) == 1
        (reservation,) = (each for each in race(lambda: ledger.reserve([0], [3])) if isinstance(each, Reservation))
        assert race(lambda: ledger.commit([3], reservation)).count(None) == 1
        assert ledger.cache_length_of(0) == 3
        assert race(lambda: ledger.release(0)).count(None) == 1
    finally:
        sys.setswitchinterval(interval)
    assert ledger.num_free == 1
    ledger.check()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda ledger: ledger.copy_prefix(2, 2, 1), "slot 2 is not claimed"),
        (lambda ledger: ledger.copy_prefix(0, 0, 0), "slot 0 cannot be copied to itself"),
        (lambda ledger: ledger.copy_prefix(2, 0, 7), "slot 2 has 6 valid tokens, not 7"),
        (lambda ledger: ledger.copy_prefix(3, 0, 1), "slot 3 has 0 valid tokens, not 1"),
        (lambda ledger: ledger.copy_prefix(2, 1, 1), "slot 1 is in flight"),
        (lambda ledger: ledger.copy_prefix(2, 4, 1), r"slot 4 is not in \[0, 4\)"),
        (lambda ledger: ledger.claim_slot(0), "slot 0 is already claimed"),
        (lambda ledger: ledger.claim_slot(-1), r"slot -1 is not in \[0, 4\)"),
        (lambda ledger: ledger.cache_length_of(3), "slot 3 is not claimed"),
        (lambda ledger: ledger.cache_length_of(4), r"slot 4 is not in \[0, 4\)"),
        (lambda ledger: ledger.rewind(2), "slot 2 is not claimed"),
        (lambda ledger: ledger.rewind(0), "slot 0: cannot take 1 tokens back, 0 are held"),
        (lambda ledger: ledger.rewind(1), "slot 1 is in flight"),
        (lambda ledger: ledger.shrink_warm(0, 0), "slot 0 is not warm"),
        (lambda ledger: ledger.shrink_warm(2, 7), "slot 2 has 6 valid tokens, not 7"),
        (lambda ledger: ledger.claim_slot(2, num_kept=7), "slot 2 has 6 valid tokens, not 7"),
        (lambda ledger: ledger.claim_slot(3, num_kept=1), "slot 3 has 0 valid tokens, not 1"),
        (lambda ledger: ledger.release(0, num_kept=1), "slot 0 has 0 valid tokens, not 1"),
        (lambda ledger: ledger.release(1), "slot 1 is in flight"),
        (lambda ledger: ledger.release(2), "slot 2 is not claimed"),
        (lambda ledger: ledger.release(4), r"slot 4 is not in \[0, 4\)"),
        (lambda ledger: ledger.claim(-1), "cannot claim -1 slots"),
        (lambda ledger: ledger.reserve([0, 4]), r"slot 4 is not in \[0, 4\)"),
        (lambda ledger: ledger.reserve([0, -1]), r"slot -1 is not in \[0, 4\)"),
        (lambda ledger: ledger.reserve([0, 3]), "slot 3 is not claimed"),
        (lambda ledger: ledger.reserve([0, 0]), "slot 0 is given twice"),
        (lambda ledger: ledger.reserve([0, 1]), "slot 1 is in flight"),
        (lambda ledger: ledger.reserve([0], [9]), "slot 0 would overrun: 0 tokens held, 9 new .* make 9, .* holds 8"),
        (lambda ledger: ledger.reserve([0], None, num_steps=9), "slot 0 would overrun: .* 1 new and 8 further steps"),
        (lambda ledger: ledger.reserve([0], [7], num_steps=3), "slot 0 would overrun: .* 7 new and 2 further steps"),
        (lambda ledger: ledger.reserve([0], [-1]), "slot 0: cannot write -1 tokens"),
        (lambda ledger: ledger.reserve([0, 3], [1]), "2 sequences, but new_tokens has 1"),
        (lambda ledger: ledger.reserve([0], num_steps=0), "num_steps must be at least 1, not 0"),
    ],
)
def test_a_refusal_of_the_ledger_changes_nothing(call: Callable[[SlotLedger], None], said: str) -> None:
    ledger = SlotLedger(num_slots=4, max_seq_len=8)
    ledger.claim_slot(2)
    ledger.commit([6], ledger.reserve([2], [6]))
    ledger.release(2, num_kept=6)
    ledger.claim(2)
    ledger.reserve([1])
    with pytest.raises(ValueError, match=said):
        call(ledger)
    ledger.check()
    assert list(ledger._in_flight) == [1]
    assert (ledger.num_free, ledger.warm, ledger.cache_length_of(0), ledger.cache_length_of(1)) == (1, {2: 6}, 0, 0)


# Slots of which not all can be full


def ledger_of(num_chunks: int, num_claimed: int, max_seq_len: int = 256) -> SlotLedger:
    """Four slots, of which the first ones are claimed, and memory for so many chunks of 64 tokens."""
    ledger = SlotLedger(4, max_seq_len, 64 * num_chunks)
    ledger.claim(num_claimed)
    return ledger


def write(ledger: SlotLedger, slot: int, num_tokens: int) -> None:
    ledger.commit([num_tokens], ledger.reserve([slot], [num_tokens]))


def use_of(ledger: SlotLedger) -> tuple[int, int, int]:
    """Chunks that are held by claimed slots, by warm ones, and by none."""
    ledger.check()
    use = ledger.budget.use
    return use.num_running // 64, use.num_warm // 64, use.num_free // 64


def test_a_claimed_slot_holds_nothing_until_it_is_written() -> None:
    ledger = ledger_of(8, 2)
    assert use_of(ledger) == (0, 0, 8)
    for slot, num_tokens, num_held in ((0, 1, 1), (0, 63, 1), (0, 1, 2), (1, 129, 5)):
        write(ledger, slot, num_tokens)
        assert use_of(ledger) == (num_held, 0, 8 - num_held)


def test_what_was_asked_for_is_held_before_it_is_written() -> None:
    ledger = ledger_of(8, 1)
    for num_tokens in (200, 10):  # nobody asks for less
        assert ledger.grow(0, num_tokens) == 0
        assert (use_of(ledger), ledger.budget.limits[0]) == ((4, 0, 4), 256)


def test_a_slot_that_is_given_back_holds_what_stays_valid() -> None:
    ledger = ledger_of(8, 2)
    write(ledger, 0, 200)
    write(ledger, 1, 64)
    ledger.release(0, 100)
    ledger.release(1)
    assert use_of(ledger) == (0, 2, 6)
    ledger.claim_slot(0, 60)
    assert use_of(ledger) == (1, 0, 7)


def test_memory_stays_where_it_was_until_it_is_wanted_elsewhere() -> None:
    ledger = ledger_of(4, 2)
    write(ledger, 0, 256)
    ledger.release(0)
    assert list(ledger.owed) == []
    for num_tokens in (64, 192):
        write(ledger, 1, num_tokens)
        assert list(ledger.owed) == [Scrub(0, 0, 256)]  # 16 chunks at a time, or all that there are


def test_of_a_warm_slot_the_rest_is_given_back_when_memory_is_wanted() -> None:
    ledger = ledger_of(5, 2)
    write(ledger, 0, 256)
    ledger.release(0, 70)
    write(ledger, 1, 150)
    assert (use_of(ledger), list(ledger.owed)) == ((3, 2, 0), [Scrub(0, 128, 256)])


def test_what_warm_slots_must_give_up_is_said_and_nothing_changes() -> None:
    ledger = ledger_of(5, 2)
    write(ledger, 0, 200)
    ledger.release(0, 200)
    assert ledger.grow(1, 190) == 128
    assert use_of(ledger) == (0, 4, 1)
    ledger.shrink_warm(0, 128)
    assert ledger.grow(1, 190) == 0
    assert (use_of(ledger), list(ledger.owed), ledger.warm) == ((3, 2, 0), [Scrub(0, 128, 256)], {0: 128})


def test_rows_for_which_there_is_no_memory_are_refused_all_or_none() -> None:
    ledger = ledger_of(5, 3)
    write(ledger, 0, 256)
    with pytest.raises(ValueError, match=r"slot 1, 2: there is no memory for more tokens: 256 of 320 are held by cl"):
        ledger.reserve([1, 2], [64, 1])
    assert use_of(ledger) == (4, 0, 1)
    ledger.reserve([1], [64])
    assert use_of(ledger) == (5, 0, 0)


def test_further_steps_and_copies_need_memory_too() -> None:
    ledger = ledger_of(4, 1)
    write(ledger, 0, 63)
    ledger.reserve([0], [1], num_steps=2)
    assert use_of(ledger) == (2, 0, 2)
    ledger = ledger_of(4, 2, max_seq_len=192)
    write(ledger, 0, 192)
    with pytest.raises(ValueError, match="slot 1: there is no memory"):
        ledger.copy_prefix(0, 1, 65)
    ledger.copy_prefix(0, 1, 64)
    assert use_of(ledger) == (4, 0, 0)


def test_all_that_nobody_holds_can_be_given_back() -> None:
    ledger = ledger_of(16, 3)
    for slot in range(3):
        write(ledger, slot, 200)
    ledger.release(0)
    ledger.release(1, 64)
    for _ in range(2):
        ledger.give_back()
        assert list(ledger.owed) == [Scrub(1, 64, 256), Scrub(0, 0, 256)]
    assert use_of(ledger) == (4, 1, 11)


def test_a_budget_that_no_full_slot_fits_into_is_refused() -> None:
    assert SlotLedger(4, 100, 128).budget.use == CacheUse(num_tokens=128)
    with pytest.raises(ValueError, match="a cache of 127 tokens cannot hold a sequence of 100 tokens in chunks of 64"):
        SlotLedger(4, 100, 127)
    assert SlotLedger(4, 100).budget.use == CacheUse(num_tokens=512)  # without budget: all that fits


def test_what_was_loaded_counts_once_it_is_restored() -> None:
    ledger, part = SlotLedger(2, 192), SavedPart(0, 64, 128, b"")
    (slot,) = ledger.claim(1)
    ledger.grow(slot, 150)
    ledger.commit([70], ledger.reserve([slot], [70]))
    ledger.load(slot, 70, 128, part)
    assert (ledger.num_valid(slot), ledger.num_loaded(slot)) == (70, 128)
    assert ledger.owed[-1] == SlotLoad(slot, 70, 128, part)
    ledger.restore(slot, 100)
    assert (ledger.num_valid(slot), ledger.num_loaded(slot)) == (100, 100)


@pytest.mark.parametrize(
    ("start", "end", "said"),
    [
        (71, 100, "cannot be loaded behind 70"),
        (70, 129, "a part from 64 to 128 cannot be loaded"),
        (60, 100, "cannot be loaded behind 70"),
    ],
)
def test_what_does_not_follow_is_not_loaded(start: int, end: int, said: str) -> None:
    ledger = SlotLedger(2, 192)
    (slot,) = ledger.claim(1)
    ledger.grow(slot, 150)
    ledger.commit([70], ledger.reserve([slot], [70]))
    with pytest.raises(ValueError, match=said):
        ledger.load(slot, start, end, SavedPart(0, 64, 128, b""))
    with pytest.raises(ValueError, match="has 70 tokens and 70 with those loaded: not 100"):
        ledger.restore(slot, 100)
    assert (ledger.num_valid(slot), list(ledger.owed)) == (70, [])
