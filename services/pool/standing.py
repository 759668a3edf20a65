"""One instance's standing: its state and what Consul is told of it, in step.

Law: changes nothing but that; the verbs (sleeping, waking, coldstart) share one of these.
"""

from __future__ import annotations

from services.lifecycle import AS_REGISTERED, State
from services.pool.memory import Memory
from services.pool.parts import Parts
from services.pool.steps import Stopwatch


class Standing:
    """slept_at: unix seconds, 0 while it doesn't sleep."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.life = parts, parts.instance.lifecycle
        self.memory = Memory(parts)
        self.slept_at = 0

    async def tell(self) -> bool:
        """Consul, as things stand. False when it couldn't be told; then it is told as soon as it answers."""
        slept_at = self.slept_at if self.life.state is State.ASLEEP else 0
        return await self.parts.herald.become(AS_REGISTERED[self.life.state], slept_at)

    async def become(self, state: State, why: str = "") -> bool:
        """Change and tell. Raises IllegalChange."""
        self.life.to(state, why)
        return await self.tell()

    async def back_to_traffic(self) -> None:
        """Nothing came of going to sleep."""
        if self.life.can(State.RUNNING):
            await self.become(State.RUNNING)

    async def admit(self, watch: Stopwatch) -> None:
        """It is verified: now the mesh may hear of it."""
        self.slept_at = 0
        with watch.step("tell Consul") as notes:
            if not await self.tell():
                notes.append("Consul doesn't answer; it is told as soon as it does")
