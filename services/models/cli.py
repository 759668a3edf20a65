"""`weir model prepare | list | path | verify`.

Law: arguments in, store and converter asked, words and exit codes out.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from regions.cli.output import emit_json, table, talk

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
NameArgument = Annotated[str, typer.Argument(help="One of `weir model list`.")]
ModelArgument = Annotated[str, typer.Argument(help="A name of `weir model list`, or a folder.")]

app = typer.Typer(no_args_is_help=True, help="Models on this machine, and those that can be brought.")


def register(root: typer.Typer) -> None:
    """Entry point of the group weir.commands."""
    root.add_typer(app, name="model")


@app.command()
def prepare(name: NameArgument, as_json: JsonOption = False) -> None:
    """Fetch a known model and convert it to safetensors, once; prints its folder."""
    from services.models.catalog import row
    from services.models.prepare import prepare as make

    console = talk()
    path = make(row(name), lambda line: console.print(line, markup=False, soft_wrap=True))
    emit_json({"name": name, "path": str(path)}) if as_json else typer.echo(str(path))


@app.command("list")
def list_(as_json: JsonOption = False) -> None:
    """What is here, and what `prepare` could bring."""
    from rich.table import Table

    from services.models.catalog import known
    from services.models.store import stored

    here = {model.name: model for model in stored()}
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "here": name in here,
            "path": str(here[name].path) if name in here else None,
            "bytes": here[name].nbytes if name in here else known()[name].megabytes << 20,
            "licence": known()[name].licence if name in known() else "",
            "summary": known()[name].summary if name in known() else "",
        }
        for name in sorted({*here, *known()})
    ]
    if as_json:
        emit_json({"models": rows})
        return
    grid = Table("model", "here", "MiB", "licence", "what it is", box=None)
    for row in rows:
        state = "yes" if row["here"] else "no"
        grid.add_row(
            str(row["name"]), state, f"{row['bytes'] >> 20}", str(row["licence"]), str(row["summary"])
        )
    table().print(grid)


@app.command()
def path(model: ModelArgument, as_json: JsonOption = False) -> None:
    """The folder of a model. Exit 2 when it isn't here, with the command that brings it."""
    from services.models.store import find

    found = find(model)
    emit_json({"model": model, "path": str(found)}) if as_json else typer.echo(str(found))


@app.command()
def verify(model: ModelArgument, as_json: JsonOption = False) -> None:
    """Read weights, config and tokenizer, compare them with their checksums. Exit 1 names what is wrong."""
    from services.models.soundness import verify as check
    from services.models.store import find

    report = check(find(model))
    if as_json:
        emit_json({"model": model, **report})
        return
    counted = f"{report['shards']} shard(s), {report['bytes']} bytes, {report['files']} files with sums"
    typer.echo(f"{model}: {counted}, {report['verdict']}")
