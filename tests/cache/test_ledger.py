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


def test_a_reservation_says_where_each_row_stands_and_how_far_it_may_go() -> None:
    ledger = SlotLedger(4, 32)
    ledger.claim(3)
    ledger.commit([7], ledger.reserve([2], [7]))
    reservation = ledger.reserve([2, 0], [1, 4], num_steps=3)
    assert reservation == Reservation(ticket=reservation.ticket, seq_ids=(2, 0), lengths=(7, 0), num_reserved=(3, 6))


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


def claimed_ledger() -> SlotLedger:
    """Slots 0, 1 and 2 of 4 are claimed, slot 1 is in flight."""
    ledger = SlotLedger(4, 8)
    ledger.claim(3)
    ledger.reserve([1])
    return ledger


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
    ],
)
def test_what_cannot_be_kept_or_copied_is_refused_and_changes_nothing(
    call: Callable[[SlotLedger], None], said: str
) -> None:
    ledger = SlotLedger(num_slots=4, max_seq_len=8)
    ledger.claim_slot(2)
    ledger.commit([6], ledger.reserve([2], [6]))
    ledger.release(2, num_kept=6)
    ledger.claim(2)
    ledger.reserve([1])
    with pytest.raises(ValueError, match=said):
        call(ledger)
    ledger.check()
    assert (ledger.num_free, ledger.warm, ledger.cache_length_of(0), ledger.cache_length_of(1)) == (1, {2: 6}, 0, 0)
