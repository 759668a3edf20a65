"""`weir executor --settings`: what --set takes, for people.

Law: prints; the names and what they mean stand with the settings themselves.
"""

from __future__ import annotations

from rich.table import Table

from regions.cli.output import table, talk
from services.tuning import SECTIONS, knobs

_RAISES = "Raises ValueError for values that make no sense."


def show() -> None:
    """The table is data, what the names mean is talk."""
    shown = Table("name", "default", "unit", box=None)
    for knob in knobs():
        shown.add_row(knob.name, f"{knob.default:g}", knob.unit)
    table().print(shown)
    for section, settings in SECTIONS.items():
        for name, it in ((section, settings), (f"{section}.cliff", getattr(settings, "cliff", None))):
            if it is not None:
                text = " ".join((type(it).__doc__ or "").replace(_RAISES, "").split())
                talk().print(f"\n{name}.*: {text}", markup=False, highlight=False)
