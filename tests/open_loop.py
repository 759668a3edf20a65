"""Open-loop load for tests: requests start by the clock, whatever became of the ones before.

Law: every request is recorded, failed ones too; nothing is judged here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import aiohttp

NO_HEADERS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Answer:
    """at: seconds since the load began, as planned. status 0: no answer at all, `body` says why."""

    at: float
    status: int
    colour: str
    attempts: int
    took_s: float
    body: str


async def ask(
    http: aiohttp.ClientSession, url: str, headers: Mapping[str, str] = NO_HEADERS, at: float = 0.0
) -> Answer:
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        async with http.get(url, headers=headers) as answer:
            body = await answer.text()
            colour = answer.headers.get("x-envoy-upstream-metadata", "")
            attempts = int(answer.headers.get("x-envoy-attempt-count", "0"))
            return Answer(at, answer.status, colour, attempts, loop.time() - began, body)
    except (aiohttp.ClientError, TimeoutError) as error:
        return Answer(at, 0, "", 0, loop.time() - began, repr(error))


async def open_loop(
    http: aiohttp.ClientSession,
    url: str,
    rate: float,
    count: int,
    headers: Callable[[int], Mapping[str, str]] = lambda _: NO_HEADERS,
) -> list[Answer]:
    """`count` requests, `rate` per second."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    tasks = []
    for number in range(count):
        await asyncio.sleep(max(0.0, start + number / rate - loop.time()))
        tasks.append(asyncio.create_task(ask(http, url, headers(number), number / rate)))
    return list(await asyncio.gather(*tasks))


async def closed_loop(
    http: aiohttp.ClientSession, url: str, headers: Sequence[Mapping[str, str]], workers: int = 16
) -> list[Answer]:
    """One request per entry of `headers`, as fast as `workers` go; answers in that order."""
    answers: dict[int, Answer] = {}
    todo = iter(enumerate(headers))

    async def work() -> None:
        for number, mine in todo:
            answers[number] = await ask(http, url, mine)

    await asyncio.gather(*(work() for _ in range(workers)))
    return [answers[n] for n in range(len(headers))]


def failures(answers: Sequence[Answer]) -> list[Answer]:
    return [a for a in answers if a.status != 200]


def colours(answers: Sequence[Answer]) -> Counter[str]:
    return Counter(a.colour for a in answers)
