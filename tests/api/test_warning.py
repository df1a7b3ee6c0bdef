"""The `Warning` header: what of a request was accepted and left out."""

from chairlift.api.http.warning import warning_header


def test_each_sentence_is_a_value_of_its_own_and_told_once() -> None:
    assert warning_header([]) == {}
    assert warning_header(["one", "two", "one"]) == {"Warning": '299 - "one", 299 - "two"'}


def test_a_sentence_cannot_end_its_quotes_or_the_header() -> None:
    assert warning_header(['a "b" \\ c\r\nX: y é']) == {"Warning": '299 - "a \\"b\\" \\\\ c??X: y ?"'}


def test_the_header_is_bounded() -> None:
    (header,) = warning_header([f"{number} {'x' * 1000}" for number in range(1000)]).values()
    assert len(header) < 2500
    assert header.endswith('..., 299 - "and 993 more warnings"'.replace("..., ", '...", ', 1))
