"""An interpreter that has the stand-in where vLLM would be, for the engine option `python=`.

Law: makes files in a folder that the caller owns.
"""

from __future__ import annotations

import sys
from pathlib import Path


def fake_python(folder: Path, *, cuda: str | None = None) -> Path:
    """An interpreter for the option `python=` that has this instead of vLLM. cuda: what its torch is for."""
    package = folder / "lib" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for one in (package, package.parent, package.parent.parent):
        (one / "__init__.py").touch()
    (package / "api_server.py").write_text("from tests.fakes.vllm_server import main\nmain()\n")
    torch = folder / "lib" / "torch"
    torch.mkdir()
    (torch / "__init__.py").touch()
    (torch / "version.py").write_text(f"cuda = {cuda!r}\n")
    script = folder / "python"
    path = f"{folder / 'lib'}:{Path(__file__).resolve().parents[2]}"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{path}" exec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    return script
