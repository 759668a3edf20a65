"""Several sequences of one answer, made at the same time, as one stream of pieces.

Law: whatever ends the stream (its end, an error in one sequence, a client that leaves) ends all of them and
waits until they are gone, so that slots and KV are free when it returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from services.generation import Generation, Piece

AHEAD = 8
"""Pieces per sequence that may wait here for a slow client; behind them the scheduler reads ahead."""


def together(sequences: Sequence[Generation]) -> AsyncGenerator[Piece, None]:
    """The pieces of all, as they come; each sequence's own order is kept. Raises ApiError, the first one."""
    return sequences[0].pieces() if len(sequences) == 1 else _merged(sequences)


async def _merged(sequences: Sequence[Generation]) -> AsyncGenerator[Piece, None]:
    queue: asyncio.Queue[Piece | asyncio.Task[None]] = asyncio.Queue(AHEAD * len(sequences))
    tasks = [asyncio.create_task(_pump(one, queue), name="choice") for one in sequences]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if isinstance(item, tuple):
                yield item
            else:
                running -= 1
                # Done but for its last step: what it raised, this raises.
                await item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(one: Generation, queue: asyncio.Queue[Piece | asyncio.Task[None]]) -> None:
    pieces = one.pieces()
    try:
        async for piece in pieces:
            await queue.put(piece)
    finally:
        await pieces.aclose()
        task = asyncio.current_task()
        # A full queue of a reader who is gone must not hold a task that is being cancelled.
        if task is not None and not task.cancelling():
            await queue.put(task)
