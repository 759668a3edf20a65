"""KV values: what is refused says why; what is taken is what was written."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.traffic.values import ValueRefused, parse_canary, parse_evacuated, parse_shares

KNOWN = ("a", "b", "c")


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"abc", "not a number"),
        (b"NaN", "not a number"),
        (b"inf", "not a number"),
        (b"1e999", "outside"),
        (b"-0.1", "outside"),
        (b"1.5", "outside"),
        (b"15", "write 0.15"),
        (b"", "empty"),
        (b" \n", "empty"),
        (b"0,15", "not a number"),
        (b"0x1", "not a number"),
        (b"1_0", "not a number"),
        (b"\xff\xfe", "UTF-8"),
        (b"0" * (600 * 1024), "614400 bytes"),
        ("٠.١".encode(), "not a number"),
    ],
)
def test_a_bad_canary_weight_is_refused_with_a_reason(raw: bytes, why: str) -> None:
    with pytest.raises(ValueRefused) as refused:
        parse_canary(raw)
    assert why in str(refused.value)
    assert len(str(refused.value)) < 200


@given(st.floats(0, 1))
def test_every_fraction_is_taken_as_written(value: float) -> None:
    assert parse_canary(repr(value).encode()) == value


@given(st.binary(max_size=64))
def test_no_bytes_break_the_parsers(raw: bytes) -> None:
    for parse in (parse_canary, lambda r: parse_shares(r, KNOWN), lambda r: parse_evacuated(r, KNOWN)):
        try:
            value = parse(raw)
        except ValueRefused:
            continue
        assert value is not None


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"[]", "object"),
        (b"{}", "object"),
        (b'{"a": 1, "mars": 2}', "unknown region mars; known: a, b, c"),
        (b'{"a": 0, "b": 0}', "zero"),
        (b'{"a": -1, "b": 2}', "negative"),
        (b'{"a": "70"}', "not a number"),
        (b'{"a": true}', "not a number"),
        (b'{"a": NaN}', "not a number"),
        (b'{"a": 1e308, "b": 1e308}', "too large"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a": 1', "not JSON"),
        (b"[" * 5000, "not JSON"),
    ],
)
def test_bad_shares_are_refused_with_a_reason(raw: bytes, why: str) -> None:
    with pytest.raises(ValueRefused) as refused:
        parse_shares(raw, KNOWN)
    assert why in str(refused.value)


@given(
    st.dictionaries(st.sampled_from(KNOWN), st.floats(0, 1e6), min_size=1).filter(
        lambda d: sum(d.values()) > 0
    )
)
def test_shares_add_up_to_one_and_name_every_region(weights: dict[str, float]) -> None:
    import json

    shares = parse_shares(json.dumps(weights).encode(), KNOWN)
    assert set(shares) == set(KNOWN)
    assert math.isclose(sum(shares.values()), 1.0)


@pytest.mark.parametrize(
    ("raw", "why"),
    [(b'["a","b","c"]', "all regions"), (b'["x"]', "unknown"), (b'"a"', "list"), (b"[1]", "list")],
)
def test_bad_evacuations_are_refused(raw: bytes, why: str) -> None:
    with pytest.raises(ValueRefused) as refused:
        parse_evacuated(raw, KNOWN)
    assert why in str(refused.value)


def test_evacuated_is_a_sorted_set() -> None:
    assert parse_evacuated(b'["b", "a", "b"]', KNOWN) == ("a", "b")
