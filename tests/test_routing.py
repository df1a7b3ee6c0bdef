"""Tests where a prompt is sent: to the replica that has its beginning warm, unless that one is loaded more than
others.
"""

from chairlift.routing import PrefixRouter, name_blocks

A, B, C = "a", "b", "c"
IDLE = {A: 0, B: 0, C: 0}


def blocks(text: str, owner: bytes = b"") -> list[bytes]:
    """Names of blocks of four bytes."""
    return name_blocks(owner, text.encode(), 4)


def test_prompts_of_an_owner_share_as_many_names_as_they_have_whole_blocks_in_common() -> None:
    ours, theirs = blocks("one two three"), blocks("one two four")
    assert len(ours) == len(theirs) == 3
    assert [x == y for x, y in zip(ours, theirs, strict=True)] == [True, True, False]
    assert blocks("one two thrice")[:2] == ours[:2]
    assert blocks("the") == []
    assert blocks("aaaabbbb")[1] != blocks("ccccbbbb")[1]  # a later block names everything before it
    assert not set(blocks("one two", b"mine")) & set(blocks("one two", b"yours"))
    assert len(name_blocks(b"", bytes(10**6))) == 512  # where no two prompts are alike any more


def router_of(*notes: tuple[str, str], **settings: int) -> PrefixRouter[str]:
    router = PrefixRouter[str](**settings)
    for text, replica in notes:
        router.note(blocks(text), replica)
    return router


def test_a_prompt_that_nobody_knows_goes_to_the_least_loaded() -> None:
    assert router_of().rank(blocks("unknown"), {A: 3, B: 1, C: 2}) == [B, C, A]


def test_the_longest_beginning_counts_before_the_load() -> None:
    router = router_of(("system prompt, mine", A), ("system prompt, yours", B))
    assert router.rank(blocks("system prompt, mine"), {A: 5, B: 1, C: 0}) == [A, B, C]
    assert router.rank(blocks("system prompt, theirs"), {A: 5, B: 1, C: 0}) == [B, C, A]  # the last who had that much


def test_who_is_ahead_by_more_than_the_slack_is_passed_over_and_the_slack_grows_with_the_load() -> None:
    router = router_of(("a long prompt", A), slack=4)
    loads = [{A: 4, B: 0, C: 0}, {A: 5, B: 1, C: 0}, {A: 110, B: 70, C: 80}, {A: 120, B: 70, C: 80}]
    assert [router.rank(blocks("a long prompt"), load)[0] for load in loads] == [A, C, A, B]
    assert router.rank(blocks("a long prompt"), loads[1]) == [C, B, A]


def test_a_prompt_that_moved_stays_where_it_went_and_one_of_a_lost_replica_moves() -> None:
    router = router_of(("a long prompt", A), ("a long prompt", B))
    assert router.rank(blocks("a long prompt"), IDLE)[0] == B
    assert router.rank(blocks("a long prompt"), {A: 1, C: 0})[0] == C


def test_the_oldest_blocks_are_forgotten_and_of_a_prompt_its_end_first() -> None:
    router = router_of(("aaaabbbb", A), ("ccccdddd", B), max_remembered=3)
    assert router.rank(blocks("aaaa"), {A: 1, B: 0, C: 0})[0] == A
    router.note(blocks("eeee"), C)
    assert router.rank(blocks("aaaa"), {A: 1, B: 0, C: 0})[0] == B
    assert router.rank(blocks("ccccdddd"), {A: 0, B: 1, C: 0})[0] == B
