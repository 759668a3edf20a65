"""The load process: the same order makes the same requests; what it records is what a drill reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from drills.history import Request
from drills.live_load import LiveGenerator
from drills.load import Sample
from drills.load_process import STARTED, LoadOrder, maker, to_request

ORDER = LoadOrder("out", {"a": "https://a"}, "ca.pem", "chat", 200.0, 0.1, 0.5, 4, 12, 15.0, 7, "drill-1")


def test_the_same_seed_gives_the_same_requests_in_the_asked_shares() -> None:
    first, again = maker(ORDER), maker(ORDER)
    made = [first(n) for n in range(4000)]
    assert made == [again(n) for n in range(4000)]
    assert 0.08 < sum(r.stream for r in made) / 4000 < 0.12
    assert 0.47 < sum(bool(r.session) for r in made) / 4000 < 0.53
    assert len({r.session for r in made if r.session}) > 1500
    other = maker(replace(ORDER, seed=8))
    assert [other(n) for n in range(100)] != made[:100]


def test_a_request_is_one_an_openai_client_could_send() -> None:
    make = maker(replace(ORDER, streams=1.0, sessions=1.0))
    request = make(0)
    assert request.path == "/chat/v1/completions"
    assert request.body is not None
    body = json.loads(request.body)
    assert (body["max_tokens"], body["stream"]) == (12, True)
    assert "model" not in body, "whatever the world's engine serves"
    assert request.headers["x-session-id"] == request.session


def test_only_a_stream_can_be_cut() -> None:
    sample = Sample(
        0, "https://a", 10.0, 10.1, 10.2, 10.5, 200, ok=False, cut=True, region="b", stage="stable"
    )
    plain = to_request(sample, {"https://a": "a"})
    assert (plain.cut, plain.ok, plain.ingress, plain.region) == (False, False, "a", "b")
    assert plain.latency_s == 0.5
    assert to_request(replace(sample, stream=True), {"https://a": "a"}).cut


def read(generator: LiveGenerator) -> Sequence[str]:
    return generator._lines()


def test_a_line_that_is_still_being_written_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    line = json.dumps(asdict(Request(1.0, 1.0, 0.1, True, 200, "a")))
    path.write_text(json.dumps(STARTED) + "\n" + line[:20])
    generator = LiveGenerator.__new__(LiveGenerator)
    generator._part = ""
    with path.open() as file:
        generator._samples = file
        assert read(generator) == [json.dumps(STARTED)]
        assert read(generator) == []
        with path.open("a") as writer:
            writer.write(line[20:] + "\n")
        (whole,) = read(generator)
    assert Request(**json.loads(whole)).latency_s == 0.1
