"""`weir bench [NAME]`: run the benches of tests/bench/ and show their rows.

Law: finds, runs, prints. Each bench makes what it needs (a world in a temporary folder, stub clients) and
removes it; one that fails leaves an error row and doesn't lose the others'.
What benches print goes to stderr.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from drills.bench_rows import Row, from_mapping
from mesh.clock import SystemClock
from regions.cli.errors import Exit, UsageError

PREFIX = "bench_"


@dataclass(frozen=True, slots=True)
class Bench:
    name: str
    path: Path


def folder() -> Path:
    """tests/bench of this checkout. Raises UsageError when weir was installed without its tests."""
    found = Path(__file__).resolve().parent.parent / "tests" / "bench"
    if not found.is_dir():
        raise UsageError("weir bench", f"{found} is missing", "run it from a checkout of the repository")
    return found


def benches(where: Path) -> tuple[Bench, ...]:
    """All benches, by file name: bench_xds_scale.py is `xds-scale`."""
    return tuple(Bench(_name(p.stem.removeprefix(PREFIX)), p) for p in sorted(where.glob(f"{PREFIX}*.py")))


def _name(text: str) -> str:
    return text.replace("_", "-")


def run(bench: Bench) -> list[Row]:
    """Rows of one bench; an error row when it raised, and for each row that makes no sense."""
    try:
        # stdout is the result of `weir bench`, perhaps JSON: a bench that talks must not break it.
        with redirect_stdout(sys.stderr):
            bodies = list(_load(bench).run())
    except Exception as error:
        traceback.print_exc()
        return [_failed(bench, "ran", error)]
    rows = [_row(bench, body) for body in bodies]
    return rows or [Row(bench.name, "ran", None, "", error="the bench gave no row")]


def _row(bench: Bench, body: Mapping[str, Any]) -> Row:
    try:
        return from_mapping({"bench": bench.name, **body})
    except (TypeError, ValueError, AttributeError) as error:
        traceback.print_exc()
        metric = body.get("metric", "row") if isinstance(body, Mapping) else "row"
        return _failed(bench, str(metric), error)


def _failed(bench: Bench, metric: str, error: Exception) -> Row:
    return Row(bench.name, metric, None, "", error=f"{type(error).__name__}: {error}")


def _load(bench: Bench) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"weir_bench_{bench.path.stem}", bench.path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{bench.path} can't be loaded")
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def register(app: typer.Typer) -> None:
    """Entry point of the group `weir.commands`."""
    app.command("bench", help="Measure: figures beside goals and peers of the same run.")(command)


def command(
    name: Annotated[str, typer.Argument(help="One bench; default all.")] = "",
    list_only: Annotated[bool, typer.Option("--list", help="Only say which there are.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Exit 0 when every goal is met, 1 when one is not or a bench failed."""
    from regions.cli.output import emit_json, talk

    known = benches(folder())
    chosen = [b for b in known if _name(name) in ("", b.name)]
    if not chosen:
        raise UsageError(f"bench {name!r}", "unknown", f"known: {', '.join(b.name for b in known)}")
    if list_only:
        emit_json({"benches": [b.name for b in known]}) if json else typer.echo(
            "\n".join(b.name for b in known)
        )
        return
    rows: list[Row] = []
    clock = SystemClock()
    for bench in chosen:
        started = clock.monotonic()
        talk().print(f"{bench.name} ...", markup=False)
        rows += run(bench)
        talk().print(f"{bench.name}: {clock.monotonic() - started:.0f} s", markup=False)
    if json:
        emit_json({"rows": [row.as_json() for row in rows]})
    else:
        _table(rows)
    raise typer.Exit(int(Exit.DONE if all(row.met is not False for row in rows) else Exit.FAILED))


def _table(rows: Sequence[Row]) -> None:
    from rich.table import Table

    from regions.cli.output import table

    grid = Table()
    for column in ("bench", "metric", "value", "unit", "goal", "met", "peer", "peer value", "ratio"):
        grid.add_column(column)
    for row in rows:
        met = {True: "yes", False: "NO", None: "-"}[row.met]
        value = row.error or _number(row.value)
        grid.add_row(
            row.bench,
            row.metric,
            value,
            row.unit,
            row.goal,
            met,
            row.peer,
            _number(row.peer_value),
            _number(row.ratio),
        )
    table().print(grid)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
