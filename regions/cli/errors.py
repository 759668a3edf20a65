"""Errors that reach a person, and the exit codes of DESIGN.md.

Law: data only. Every error names the thing, the reason and the way out.
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of every `weir` command (../shared/DESIGN.md, "Exit codes and output")."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    UNKNOWN = 3
    REFUSED = 4
    PARTIAL = 5
    INTERRUPTED = 130


class WeirError(Exception):
    """What a person must hear. `what` names the thing, `why` the reason, `way_out` the next step."""

    exit_code: Exit = Exit.FAILED

    def __init__(self, what: str, why: str, way_out: str = "", *, exit_code: Exit | None = None) -> None:
        self.what, self.why, self.way_out = what, why, way_out
        if exit_code is not None:
            self.exit_code = exit_code
        super().__init__(f"{what}: {why}" + (f"\n  way out: {way_out}" if way_out else ""))


class UsageError(WeirError):
    """The command line or a data file is wrong."""

    exit_code = Exit.USAGE


class Refused(WeirError):
    """A safety rule, a lock or a missing confirmation said no."""

    exit_code = Exit.REFUSED
