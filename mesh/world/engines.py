"""Which engines a local world can run, and what each needs before the first process starts.

Law: data and pure functions. The engines themselves are the executor's (services/engines); here stands only
what differs for a world on one machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ECHO = "echo"
SMALL_MODEL = "smollm2-135m-instruct"
MODEL, PYTHON = "--model", "python="
"""What a person may bring along: a model of their own; an interpreter of their own that has the engine."""


@dataclass(frozen=True, slots=True)
class Need:
    """A weir command to run first; quick when it has nothing to do. unless: a person brings that along."""

    command: tuple[str, ...]
    unless: str = ""


_PREPARE = Need(("model", "prepare", SMALL_MODEL), unless=MODEL)
_TORCH, _VLLM = ("setup", "--with", "torch", "--quiet"), ("setup", "--with", "vllm", "--quiet")


@dataclass(frozen=True, slots=True)
class EngineRow:
    """model: what is served when nobody says. needs: in the order to run them in (see `needs`).
    options: NAME=VALUE for the executors of a world, which share one machine.
    instances, canaries: per region, when nobody says. ready_s: longest time to be ready. catalog: folder in
    services/ with the service rows whose time limits fit this engine.
    """

    model: str
    needs: tuple[Need, ...] = ()
    options: tuple[str, ...] = ()
    instances: int = 2
    canaries: int = 1
    ready_s: float = 120.0
    catalog: str = "catalog"


ENGINES: Mapping[str, EngineRow] = {
    ECHO: EngineRow("echo-1"),
    "sim": EngineRow("sim-1"),
    "torch": EngineRow(
        SMALL_MODEL,
        needs=(Need(_TORCH), _PREPARE),
        options=("threads=1",),
        instances=1,
        ready_s=300.0,
        catalog="catalog_cpu",
    ),
    # A server of 1.4 GB and a minute of both cores each: one a region, and canaries for who asks.
    "vllm": EngineRow(
        SMALL_MODEL,
        # Torch of our own makes the model's files, no more.
        needs=(Need(_TORCH, unless=MODEL), _PREPARE, Need(_VLLM, unless=PYTHON)),
        instances=1,
        canaries=0,
        ready_s=900.0,
        catalog="catalog_cpu",
    ),
}


def row(engine: str) -> EngineRow | None:
    """None for an engine that a world can't run."""
    return ENGINES.get(engine)


def needs(engine: str, model: str, options: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """weir commands to run before a world of this engine starts. model: "" is the engine's own."""
    brought = {MODEL} if model else set()
    brought |= {PYTHON for text in options if text.startswith(PYTHON) and text != PYTHON}
    return tuple(need.command for need in ENGINES[engine].needs if need.unless not in brought)


def slower_s(engine: str) -> float:
    """Seconds that an engine may start later than an echo: what waits for a region waits so much longer."""
    return max(0.0, ENGINES[engine].ready_s - ENGINES[ECHO].ready_s)


def option_words(engine: str, options: Sequence[str], settings: Sequence[str] = ()) -> tuple[str, ...]:
    """`--option NAME=VALUE` for an executor: those of every world, then the given ones, which win; then
    `--set NAME=VALUE`."""
    told = tuple(word for text in (*ENGINES[engine].options, *options) for word in ("--option", text))
    return told + tuple(word for text in settings for word in ("--set", text))


def check_words(
    engine: str, model: str, options: Sequence[str], settings: Sequence[str] = ()
) -> tuple[str, ...]:
    """The weir command that says whether an executor can make sense of these, and starts nothing."""
    nobody = ("--instance", "check", "--region", "check", "--listen", "127.0.0.1:1")
    told = ("--engine", engine, "--model", model or ENGINES[engine].model)
    return ("executor", "--check", *nobody, *told, *option_words(engine, options, settings))


def defaults(engine: str) -> dict[str, int]:
    """Fields of WorldSpec that follow from the engine, unless somebody says otherwise."""
    found = ENGINES.get(engine, ENGINES[ECHO])
    return {"instances": found.instances, "canaries": found.canaries}
