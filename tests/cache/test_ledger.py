"""The books of the cache on their own: order of ids, reservations, the self-check, many threads at once."""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from chairlift.cache import CacheFull
from chairlift.cache.ledger import Reservation, SlotLedger
from chairlift.cache.prefixes import CommonPrefix


def race(num_threads: int, attempt: Callable[[], object]) -> list[object]:
    """Lets that many threads make the same call at the same moment; returns what each got, or the error it met."""
    barrier = threading.Barrier(num_threads)

    def run(_: int) -> object:
        barrier.wait()
        try:
            return attempt()
        except ValueError as error:
            return error

    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(run, range(num_threads)))


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Threads give way to each other between almost any two bytecodes."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize(("num_slots", "max_seq_len"), [(0, 8), (4, 0), (-1, 8)])
def test_a_ledger_without_room_is_refused(num_slots: int, max_seq_len: int) -> None:
    with pytest.raises(ValueError, match=f"{num_slots} slots of {max_seq_len}"):
        SlotLedger(num_slots, max_seq_len)


def test_the_lowest_free_ids_are_claimed_first_so_that_batches_stay_dense() -> None:
    ledger = SlotLedger(6, 8)
    assert ledger.claim(4) == [0, 1, 2, 3]
    for seq_id in (3, 0, 1):
        ledger.release(seq_id)
    assert ledger.claim(2) == [0, 1]
    assert ledger.claim(3) == [3, 4, 5]


def test_a_reservation_says_where_each_row_stands_and_how_far_it_may_go() -> None:
    ledger = SlotLedger(4, 32)
    ledger.claim(3)
    ledger.commit([7], ledger.reserve([2], [7]))
    reservation = ledger.reserve([2, 0], [1, 4], num_steps=3)
    assert reservation == Reservation(ticket=reservation.ticket, seq_ids=(2, 0), lengths=(7, 0), num_reserved=(3, 6))


def test_a_token_can_be_taken_back_and_written_again() -> None:
    ledger = SlotLedger(2, 8)
    (slot,) = ledger.claim(1)
    ledger.commit([3], ledger.reserve([slot], [3]))
    ledger.rewind(slot)
    assert ledger.cache_length_of(slot) == 2
    reservation = ledger.reserve([slot])
    assert reservation.lengths == (2,)
    with pytest.raises(ValueError, match=f"slot {slot} is in flight"):
        ledger.rewind(slot)
    ledger.commit([1], reservation)
    assert ledger.cache_length_of(slot) == 3
    ledger.check()


def test_no_token_can_be_taken_back_where_there_is_none() -> None:
    ledger = SlotLedger(2, 8)
    with pytest.raises(ValueError, match="slot 1 is not claimed"):
        ledger.rewind(1)
    (slot,) = ledger.claim(1)
    with pytest.raises(ValueError, match=f"slot {slot}: cannot take 1 tokens back, 0 are held"):
        ledger.rewind(slot)


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


def test_rows_of_two_reservations_are_committed_independently() -> None:
    ledger = SlotLedger(2, 8)
    ledger.claim(2)
    first, second = ledger.reserve([0], [3]), ledger.reserve([1], [4])
    ledger.commit([4], second)
    assert (ledger.cache_length_of(0), ledger.cache_length_of(1)) == (0, 4)
    ledger.commit([3], first)
    assert (ledger.cache_length_of(0), ledger.cache_length_of(1)) == (3, 4)


def claimed_ledger() -> SlotLedger:
    """Slots 0, 1 and 2 of 4 are claimed, slot 1 is in flight."""
    ledger = SlotLedger(4, 8)
    ledger.claim(3)
    ledger.reserve([1])
    return ledger


def forget_a_slot(ledger: SlotLedger) -> None:
    ledger._free.remove(3)


def free_a_slot_twice(ledger: SlotLedger) -> None:
    ledger._free.append(3)


def free_a_claimed_slot(ledger: SlotLedger) -> None:
    ledger._free.append(0)


def invent_a_slot(ledger: SlotLedger) -> None:
    ledger._free.append(4)


def overfill_a_slot(ledger: SlotLedger) -> None:
    ledger._lengths[0] = 9


def owe_a_slot_tokens(ledger: SlotLedger) -> None:
    ledger._lengths[0] = -1


def fly_a_free_slot(ledger: SlotLedger) -> None:
    ledger._in_flight[3] = 1


@pytest.mark.parametrize(
    "damage",
    [
        forget_a_slot,
        free_a_slot_twice,
        free_a_claimed_slot,
        invent_a_slot,
        overfill_a_slot,
        owe_a_slot_tokens,
        fly_a_free_slot,
    ],
)
def test_check_notices_damaged_books(damage: Callable[[SlotLedger], None]) -> None:
    ledger = claimed_ledger()
    ledger.check()
    damage(ledger)
    with pytest.raises(AssertionError):
        ledger.check()


@pytest.mark.usefixtures("eager_switching")
def test_of_several_threads_that_want_the_same_slot_one_gets_it() -> None:
    ledger = SlotLedger(1, 8)
    outcomes = race(8, lambda: ledger.claim(1))
    assert outcomes.count([0]) == 1
    assert sum(isinstance(outcome, CacheFull) for outcome in outcomes) == 7
    ledger.check()


@pytest.mark.usefixtures("eager_switching")
def test_of_several_threads_that_reserve_commit_or_release_the_same_row_one_succeeds() -> None:
    ledger = SlotLedger(1, 8)
    ledger.claim(1)
    reservations = [r for r in race(8, lambda: ledger.reserve([0], [3])) if isinstance(r, Reservation)]
    assert len(reservations) == 1
    assert race(8, lambda: ledger.commit([3], reservations[0])).count(None) == 1
    assert ledger.cache_length_of(0) == 3
    assert race(8, lambda: ledger.release(0)).count(None) == 1
    assert ledger.num_free == 1
    ledger.check()


# Warm slots


def warm_ledger(**lengths: int) -> SlotLedger:
    """Four slots, some of them warm: `s2=5` is slot 2 with five valid tokens; they were used in this order."""
    ledger = SlotLedger(num_slots=4, max_seq_len=8)
    for name, length in lengths.items():
        slot = int(name[1:])
        ledger.claim_slot(slot)
        ledger.commit([length], ledger.reserve([slot], [length]))
        ledger.release(slot, num_kept=length)
    ledger.check()
    return ledger


def test_a_slot_released_with_tokens_is_warm_and_still_claimable() -> None:
    ledger = warm_ledger(s1=5)
    assert (ledger.num_free, ledger.slots_remaining, ledger.warm) == (3, 4, {1: 5})
    assert (ledger.contains(1), ledger.num_valid(1)) == (False, 5)


def test_free_slots_are_claimed_before_warm_ones_and_of_these_the_least_recently_used() -> None:
    ledger = warm_ledger(s2=3, s0=4)
    assert ledger.claim(3) == [1, 3, 2]
    assert [ledger.cache_length_of(slot) for slot in (1, 3, 2)] == [0, 0, 0]
    assert ledger.warm == {0: 4}


def test_a_warm_slot_is_claimed_with_as_much_of_it_as_is_wanted() -> None:
    ledger = warm_ledger(s2=6)
    ledger.claim_slot(2, num_kept=4)
    assert (ledger.cache_length_of(2), ledger.warm, ledger.num_free) == (4, {}, 3)
    ledger.check()


def test_a_copy_gives_its_target_the_length_and_makes_its_source_recently_used() -> None:
    ledger = warm_ledger(s2=6, s3=1)
    (target,) = ledger.claim(1)
    ledger.copy_prefix(2, target, 5)
    assert ledger.cache_length_of(target) == 5
    assert list(ledger.warm) == [3, 2]


def test_a_claimed_slot_can_be_copied_as_far_as_it_is_committed() -> None:
    ledger = SlotLedger(num_slots=4, max_seq_len=8)
    source, target = ledger.claim(2)
    ledger.commit([3], ledger.reserve([source], [3]))
    ledger.reserve([source])  # what is in flight is not there yet
    with pytest.raises(ValueError, match="slot 0 has 3 valid tokens, not 4"):
        ledger.copy_prefix(source, target, 4)
    ledger.copy_prefix(source, target, 3)
    assert ledger.cache_length_of(target) == 3


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda ledger: ledger.copy_prefix(2, 2, 1), "slot 2 is not claimed"),
        (lambda ledger: ledger.copy_prefix(0, 0, 0), "slot 0 cannot be copied to itself"),
        (lambda ledger: ledger.copy_prefix(2, 0, 7), "slot 2 has 6 valid tokens, not 7"),
        (lambda ledger: ledger.copy_prefix(3, 0, 1), "slot 3 has 0 valid tokens, not 1"),
        (lambda ledger: ledger.copy_prefix(2, 1, 1), "slot 1 is in flight"),
        (lambda ledger: ledger.copy_prefix(2, 4, 1), r"slot 4 is not in \[0, 4\)"),
        (lambda ledger: ledger.claim_slot(2, num_kept=7), "slot 2 has 6 valid tokens, not 7"),
        (lambda ledger: ledger.claim_slot(3, num_kept=1), "slot 3 has 0 valid tokens, not 1"),
        (lambda ledger: ledger.release(0, num_kept=1), "slot 0 has 0 valid tokens, not 1"),
        (lambda ledger: ledger.release(1), "slot 1 is in flight"),
        (lambda ledger: ledger.release(2), "slot 2 is not claimed"),
        (lambda ledger: ledger.release(4), r"slot 4 is not in \[0, 4\)"),
        (lambda ledger: ledger.claim(-1), "cannot claim -1 slots"),
    ],
)
def test_what_cannot_be_kept_or_copied_is_refused_and_changes_nothing(
    call: Callable[[SlotLedger], None], said: str
) -> None:
    ledger = warm_ledger(s2=6)
    ledger.claim(2)
    ledger.reserve([1])
    with pytest.raises(ValueError, match=said):
        call(ledger)
    ledger.check()
    assert (ledger.num_free, ledger.warm, ledger.cache_length_of(0), ledger.cache_length_of(1)) == (1, {2: 6}, 0, 0)


def test_warm_slots_can_be_declared_free() -> None:
    ledger = warm_ledger(s2=6, s0=1, s3=2)
    ledger.free_warm([2, 0])
    assert (ledger.num_free, ledger.warm, ledger.claim(4)) == (3, {3: 2}, [0, 1, 2, 3])


def test_only_warm_slots_are_declared_free_all_or_none() -> None:
    ledger = warm_ledger(s2=6)
    ledger.claim_slot(0)
    with pytest.raises(ValueError, match=r"slots \[0, 1\] are not warm"):
        ledger.free_warm([2, 0, 1])
    assert (ledger.num_free, ledger.warm) == (2, {2: 6})
    ledger.check()


@pytest.mark.parametrize(("length", "num_new", "num_steps"), [(0, 8, 1), (5, 3, 1), (5, 1, 3), (7, 1, 1)])
def test_a_slot_can_be_filled_to_its_last_token_and_no_further(length: int, num_new: int, num_steps: int) -> None:
    ledger = SlotLedger(1, 8)
    ledger.claim(1)
    ledger.commit([length], ledger.reserve([0], [length]))
    with pytest.raises(ValueError, match="would overrun"):
        ledger.reserve([0], [num_new + 1], num_steps)
    with pytest.raises(ValueError, match="would overrun"):
        ledger.reserve([0], [num_new], num_steps + 1)
    ledger.reserve([0], [num_new], num_steps)


def test_the_lowest_free_slot_is_claimed_first_also_after_one_was_claimed_by_its_number() -> None:
    ledger = SlotLedger(4, 8)
    for slot in sorted(ledger.claim(4), key=[0, 2, 1, 3].index):
        ledger.release(slot)
    ledger.claim_slot(0)
    assert ledger.claim(3) == [1, 2, 3]
