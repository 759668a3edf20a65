"""`weir kv plan | shapes`: what fits into a memory, before anything is started.

Law: arguments in, services/kv/plan.py asked, words out. Neither torch nor any weights are loaded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from regions.cli.errors import Exit, UsageError, WeirError
from regions.cli.output import emit_json, table, talk
from services.kv import report
from services.kv.config import ConfigError, shape_of
from services.kv.models import Described, describe
from services.kv.plan import Memory, NoRoom, Plan, plan
from services.kv.published import PUBLISHED
from services.kv.shape import KvShape, dtype_name
from services.kv.sizes import parse_count, parse_size, show_size

MOST_BYTES = 1 << 50
"""More than any device, or all of a rack, has."""
Model = Annotated[str, typer.Option(help="A stored model, a folder, a config.json, or a published shape.")]
Context = Annotated[str, typer.Option(help="Tokens per sequence, prompt and answer: 8192, 8K.")]
OfDevice = Annotated[str, typer.Option(help="Of the device: 8GiB, 80GB.")]
Weights = Annotated[
    str, typer.Option(help="auto: counted from the files or the config; none: all memory is for KV; a size.")
]
Reserve = Annotated[str, typer.Option(help="Kept free for activations and graphs.")]
Dtype = Annotated[
    str, typer.Option(help="Type that the model runs in: auto (as published), fp32, bf16, fp16.")
]
KvDtype = Annotated[str, typer.Option(help="Of the cache: auto (as --dtype), fp32, bf16, fp16, fp8.")]
Block = Annotated[int, typer.Option(help="Tokens per block.")]
Window = Annotated[int, typer.Option(help="Sliding window in tokens; 0: keep all; -1: as the model says.")]
Chunk = Annotated[
    int, typer.Option(help="Prompt tokens that the engine computes in one step; counts beside a window.")
]
Sequences = Annotated[bool, typer.Option("--sequences", help="Also other contexts, by doubling.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]

app = typer.Typer(no_args_is_help=True, help="The KV cache: what a sequence costs and how many fit.")


def register(root: typer.Typer) -> None:
    """Entry point `57_kv` of the group weir.commands."""
    root.add_typer(app, name="kv")


@app.command("plan")
def plan_(
    model: Model,
    context: Context,
    memory: OfDevice,
    weights: Weights = "auto",
    reserve: Reserve = "0",
    dtype: Dtype = "auto",
    kv_dtype: KvDtype = "auto",
    block: Block = 16,
    window: Window = -1,
    chunk: Chunk = 512,
    sequences: Sequences = False,
    as_json: AsJson = False,
) -> None:
    """How many sequences fit, and where it stops fitting. Exit 1 when not even one does."""
    runs_in = dtype if dtype == "auto" else _dtype("--dtype", dtype)
    found = describe(model, runs_in)
    shape = _shape(found, runs_in if kv_dtype == "auto" else _dtype("--kv-dtype", kv_dtype), block, window)
    shape = replace(shape, chunk=_at_least_one("--chunk", chunk))
    room = Memory(_size("--memory", memory), _weights(found, weights), _size("--reserve", reserve))
    answer = _plan(shape, room, _count("--context", context))
    more = report.contexts(answer) if sequences else ()
    if shape.context and answer.context > shape.context:
        talk().print(f"warning: {model} itself goes to {shape.context:,} tokens only", markup=False)
    if as_json:
        emit_json(report.as_json(found.name, found.source, answer, more))
    else:
        typer.echo("\n".join(report.lines(found.name, found.source, answer, more)))
    raise typer.Exit(int(Exit.DONE if answer.sequences else Exit.FAILED))


@app.command("shapes")
def shapes(as_json: AsJson = False) -> None:
    """The published shapes that `plan` knows by name."""
    rows = {name: shape_of(config) for name, config in PUBLISHED.items()}
    if as_json:
        emit_json({"shapes": [_row(name, shape) for name, shape in rows.items()]})
        return
    from rich.table import Table

    grid = Table("name", "layers", "KV heads", "head", "kind", "window", "context", "per token", box=None)
    for name, shape in rows.items():
        size = show_size(shape.bytes_per_token)
        numbers = (shape.layers, shape.kv_heads, shape.head_dim, shape.kind, shape.pool_window, shape.context)
        grid.add_row(name, *map(str, numbers), size)
    table().print(grid)


def _row(name: str, shape: KvShape) -> dict[str, Any]:
    return {"name": name, **report.shape_json(shape), "context": shape.context}


def _shape(found: Described, kv_dtype: str, block: int, window: int) -> KvShape:
    _at_least_one("--block", block)
    if not -1 <= window <= 1 << 40:
        raise UsageError(f"--window {window}", "out of range", "0 keeps all, -1 does as the model says")
    try:
        shape = shape_of(found.config, kv_dtype=kv_dtype, block=block)
    except ConfigError as error:
        raise UsageError(found.source, str(error)) from None
    return shape if window < 0 else shape.with_window(window)


def _plan(shape: KvShape, memory: Memory, context: int) -> Plan:
    if not 1 <= context <= 1 << 32:
        raise UsageError(f"--context {context}", "out of range", "from 1 to 4,294,967,296 tokens")
    try:
        return plan(shape, memory, context)
    except NoRoom:
        taken = f"weights {show_size(memory.weights)}"
        if memory.reserve:
            taken += f" + reserve {show_size(memory.reserve)}"
        raise WeirError(
            f"--memory {show_size(memory.total)}",
            f"nothing is left for the KV cache: {taken}",
            "more memory, a smaller model, or --weights none to plan the cache alone",
        ) from None


def _weights(found: Described, text: str) -> int:
    if text == "none":
        return 0
    if text != "auto":
        return _size("--weights", text)
    if found.weights is None:
        raise UsageError(
            found.source, "the size of its weights isn't known", "give --weights SIZE, or --weights none"
        )
    return found.weights


def _at_least_one(option: str, number: int) -> int:
    if not 1 <= number <= 1 << 20:
        raise UsageError(f"{option} {number}", "out of range", "from 1 to 1,048,576")
    return number


def _dtype(option: str, text: str) -> str:
    try:
        return dtype_name(text)
    except ValueError as error:
        raise UsageError(option, str(error)) from None


def _size(option: str, text: str) -> int:
    try:
        found = parse_size(text)
    except ValueError as error:
        raise UsageError(option, str(error)) from None
    if found > MOST_BYTES:
        raise UsageError(f"{option} {text}", "out of range", f"up to {show_size(MOST_BYTES)}")
    return found


def _count(option: str, text: str) -> int:
    try:
        return parse_count(text)
    except ValueError as error:
        raise UsageError(option, str(error)) from None
