"""`weir executor`: start one model instance in the foreground.

Law: hands over what was said; the server is imported inside, so that `weir --help` stays fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from services.options import Grouped, Told, taking

if TYPE_CHECKING:
    from services.assembly import Stack


def register(app: typer.Typer) -> None:
    """Entry point of the group `weir.commands`."""
    text = "Run one model instance: OpenAI-compatible server, registered in Consul."
    app.command("executor", cls=Grouped, help=text)(taking(executor))


def executor(told: Told) -> None:
    """Serve until SIGTERM, which drains. The Consul token comes from CONSUL_HTTP_TOKEN or …_FILE."""
    import asyncio
    import gc
    import logging

    from services.main import serve
    from services.telemetry.trace import in_logs
    from services.told import settings_of

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    in_logs()
    settings = settings_of(told)
    if told.check:
        _makes_sense(settings.stack)
        return
    gc.freeze()
    asyncio.run(serve(settings))


def _makes_sense(stack: Stack) -> None:
    """Make the engines and throw them away. Raises UsageError for a model, option or rule without sense."""
    from random import Random

    from mesh.clock import SystemClock
    from services.assembly import assemble

    assemble(stack, SystemClock(), Random())  # noqa: S311 (jitter, no secret)
