"""Incremental detokenization: whole characters, stop strings, no lost bytes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gateway.prompt import Detokenizer


def read(pieces: list[bytes], stops: tuple[str, ...] = ()) -> tuple[str, str | None, list[str]]:
    """Return (text, stop string found, text pieces as they came) for tokens with these bytes."""
    reader = Detokenizer(lambda token: pieces[token], stops)
    parts = [reader.push(token) for token in range(len(pieces))]
    parts.append(reader.finish())
    return "".join(parts), reader.stopped_by, parts


def cut(text: str, places: list[int]) -> list[bytes]:
    """Return the bytes of a text, cut anywhere, also inside characters."""
    data = text.encode()
    borders = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(borders)]


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Reference: read character by character, end where a stop string completes."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_replaces_incomplete_character_at_end() -> None:
    """An answer may stop at any token; the rest must still be text."""
    assert read([b"a", "é".encode()[:1]])[0] == "a\ufffd"


def test_first_complete_stop_wins_however_tokens_are_cut() -> None:
    """The same text must give the same answer however it is cut into tokens."""
    assert read([b"abcd"], ("abcd", "bc"))[:2] == ("a", "bc")
    assert read([b"a", b"b", b"c", b"d"], ("abcd", "bc"))[:2] == ("a", "bc")
    assert read([b"abc"], ("c", "bc"))[:2] == ("a", "bc")


TEXT = st.text(alphabet="ab🙂é", max_size=12)
STOPS = st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=4), max_size=4).map(tuple)
PLACES = st.lists(st.integers(0, 60), max_size=8)


@given(TEXT, STOPS, PLACES)
def test_matches_reference_for_any_cut(
    text: str, stops: tuple[str, ...], places: list[int]
) -> None:
    """The same text, the same stop string, and no stop string ever leaks."""
    found, stop, parts = read(cut(text, places), stops)

    assert (found, stop) == first_stop(text, stops)
    shown = ""
    for part in parts:
        shown += part
        assert not any(stop in shown for stop in stops)
        assert "\ufffd" not in part


@given(st.lists(st.binary(max_size=3), max_size=8))
def test_decodes_any_bytes_like_python(pieces: list[bytes]) -> None:
    """A model may emit any bytes; none is lost and none raises."""
    assert read(pieces)[0] == b"".join(pieces).decode("utf-8", "replace")


@given(TEXT, STOPS, PLACES)
def test_released_never_exceeds_decoded(
    text: str, stops: tuple[str, ...], places: list[int]
) -> None:
    """Logprobs are reported by these two counts."""
    pieces = cut(text, places)
    reader = Detokenizer(lambda token: pieces[token], stops)
    released = 0
    for token in range(len(pieces)):
        released += len(reader.push(token))

        assert reader.released == released <= reader.decoded


@given(st.text(max_size=20), st.lists(st.integers(0, 99), max_size=8), st.integers(1, 4))
def test_push_all_equals_single_pushes(text: str, places: list[int], most: int) -> None:
    """Tokens that wait for a slow reader arrive together; the text must not depend on it."""
    pieces = cut(text, places)
    reader = Detokenizer(lambda token: pieces[token])
    tokens = range(len(pieces))
    parts = [reader.push_all(tokens[at : at + most]) for at in range(0, len(pieces), most)]
    parts.append(reader.finish())

    assert "".join(parts) == text
    assert reader.decoded == reader.released == len(text)
