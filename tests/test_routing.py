"""Where a prompt is sent: to the replica that has its beginning warm, unless that one is loaded more than others."""

from chairlift.routing import PrefixRouter, name_blocks

A, B, C = "a", "b", "c"
IDLE = {A: 0, B: 0, C: 0}


def blocks(text: str, owner: bytes = b"") -> list[bytes]:
    """Names of blocks of four bytes."""
    return name_blocks(owner, text.encode(), 4)


def test_prompts_share_as_many_names_as_they_have_whole_blocks_in_common() -> None:
    ours, theirs = blocks("one two three"), blocks("one two four")
    assert len(ours) == len(theirs) == 3
    assert [x == y for x, y in zip(ours, theirs, strict=True)] == [True, True, False]
    assert blocks("one two thrice")[:2] == ours[:2]
    assert blocks("the") == []


def test_an_equal_text_of_another_owner_is_another_prompt() -> None:
    assert not set(blocks("one two", b"mine")) & set(blocks("one two", b"yours"))


def test_a_later_block_names_everything_before_it() -> None:
    assert blocks("aaaabbbb")[1] != blocks("ccccbbbb")[1]


def test_names_stop_where_no_two_prompts_are_alike_any_more() -> None:
    assert len(name_blocks(b"", bytes(10**6))) == 512


def test_a_prompt_that_nobody_knows_goes_to_the_least_loaded() -> None:
    assert PrefixRouter[str]().rank(blocks("unknown"), {A: 3, B: 1, C: 2}) == [B, C, A]


def test_the_longest_beginning_counts_before_the_load() -> None:
    router = PrefixRouter[str]()
    router.note(blocks("system prompt, mine"), A)
    router.note(blocks("system prompt, yours"), B)
    assert router.rank(blocks("system prompt, mine"), {A: 5, B: 1, C: 0}) == [A, B, C]
    assert router.rank(blocks("system prompt, theirs"), {A: 5, B: 1, C: 0}) == [B, C, A]  # the last who had that much


def test_who_is_ahead_by_more_than_the_slack_is_passed_over() -> None:
    router = PrefixRouter[str](slack=4)
    router.note(blocks("a long prompt"), A)
    assert router.rank(blocks("a long prompt"), {A: 4, B: 0, C: 0})[0] == A
    assert router.rank(blocks("a long prompt"), {A: 5, B: 1, C: 0}) == [C, B, A]


def test_where_all_have_much_to_do_the_slack_grows_with_the_load() -> None:
    router = PrefixRouter[str](slack=4)
    router.note(blocks("a long prompt"), A)
    assert router.rank(blocks("a long prompt"), {A: 110, B: 70, C: 80})[0] == A
    assert router.rank(blocks("a long prompt"), {A: 120, B: 70, C: 80})[0] == B


def test_a_prompt_that_moved_stays_where_it_went_and_one_of_a_lost_replica_moves() -> None:
    router = PrefixRouter[str]()
    for replica in (A, B):
        router.note(blocks("a long prompt"), replica)
    assert router.rank(blocks("a long prompt"), IDLE)[0] == B
    assert router.rank(blocks("a long prompt"), {A: 1, C: 0})[0] == C


def test_the_oldest_blocks_are_forgotten_and_of_a_prompt_its_end_first() -> None:
    router = PrefixRouter[str](max_remembered=3)
    router.note(blocks("aaaabbbb"), A)
    router.note(blocks("ccccdddd"), B)
    assert router.rank(blocks("aaaa"), IDLE)[0] == A
    router.note(blocks("eeee"), C)
    assert router.rank(blocks("aaaa"), {A: 1, B: 0, C: 0})[0] == B
    assert router.rank(blocks("ccccdddd"), {A: 0, B: 1, C: 0})[0] == B
