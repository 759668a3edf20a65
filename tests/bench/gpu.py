"""Everything of the execution tier that only a GPU can show, in one run of five minutes at most.

    python3 tests/bench/gpu.py --out rows.json           on a machine with a GPU
    python3 tests/bench/gpu.py --device cpu --tiny       that all of it runs; its figures say nothing

Law: needs torch and the standard library; the weights section also safetensors and xxhash. A section that
fails leaves an error row and what it had measured; the file is written after each, so that a run cut short
keeps its rows. Settings of the card are never touched.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import platform
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench import gpu_rows
from tests.bench.gpu_rows import SECTIONS, TOTAL_S, Budget

HARD_LIMIT_S = 295
"""A device that hangs can't be interrupted from Python: then the process ends itself, with a traceback."""

Section = Callable[[Any], Iterator[dict[str, Any]]]


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every section ran to its end, whatever the figures; 1 when one broke off; 2: no such device."""
    args = parser().parse_args(argv)
    faulthandler.dump_traceback_later(HARD_LIMIT_S, exit=True)
    try:
        return run(args)
    finally:
        faulthandler.cancel_dump_traceback_later()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="Measure the execution tier on a GPU.")
    made.add_argument("--out", type=Path, help="JSON file for the rows")
    made.add_argument("--device", default="cuda", help="cuda, cuda:1, cpu")
    made.add_argument("--tiny", action="store_true", help="small sizes: that it runs, not how fast")
    made.add_argument("--seconds", type=float, default=TOTAL_S, help="for all sections together")
    made.add_argument("--only", choices=list(SECTIONS), action="append", help="this section; may be repeated")
    return made


def run(args: argparse.Namespace) -> int:
    import torch

    from tests.bench.gpu_env import Env, now, tidy

    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu --tiny shows that the script runs", file=sys.stderr)
        return 2
    chosen = {name: s for name, s in SECTIONS.items() if not args.only or name in args.only}
    budget = Budget(now, args.seconds, chosen)
    rows: list[dict[str, Any]] = []
    broken = False
    for name in chosen:
        begin = now()
        tidy(device)  # what a section left behind, perhaps by failing, must not be missing to the next
        made, whole = collect(name, Env(device, args.tiny, budget.open(name)))
        rows += made
        broken = broken or not whole
        print(f"{name}: {len(made)} rows, {now() - begin:.1f} s", file=sys.stderr, flush=True)
        save(args.out, report(device, args, rows))
    print(gpu_rows.table(rows))
    return int(broken)


def collect(
    name: str, env: Any, find: Callable[[str], Section] | None = None
) -> tuple[list[dict[str, Any]], bool]:
    """Rows of one section, and whether it came to its end. What it raises becomes its last row; its imports
    are part of it."""
    rows: list[dict[str, Any]] = []
    try:
        for row in (find or section_of)(name)(env):
            rows.append(row)
    except Exception as error:
        traceback.print_exc()
        return [*rows, gpu_rows.failed(name, error)], False
    return rows, True


def section_of(name: str) -> Section:
    """The section's function. Raises ImportError where this machine lacks what it needs."""
    found: Section = import_module(f"tests.bench.gpu_{name}").section
    return found


def report(device: Any, args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All that the file says."""
    from tests.bench.gpu_device import facts

    return {
        "schema_version": 1,
        "bench": gpu_rows.NAME,
        "tiny": args.tiny,
        "python": platform.python_version(),
        **facts(device),
        "rows": list(rows),
    }


def save(path: Path | None, body: dict[str, Any]) -> None:
    """Whole or not at all: a reader never sees half of a file."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(body, indent=2, allow_nan=False) + "\n")
    beside.replace(path)


if __name__ == "__main__":
    sys.exit(main())
