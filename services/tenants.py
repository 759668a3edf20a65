"""Tenants and their classes, as a table.

Law: pure; the rows come from services/tenants.yaml (services/tenants_file.py reads it). A class is never
taken from a client, and a name that the table doesn't have never becomes a metric label: clients could make
as many as they like.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

HEADER = "x-weir-tenant"
DEFAULT, OTHER = "default", "other"
"""The row of those who say no name, or one we don't know; and the label of the latter."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """label: its name in metrics. priority: of its class, 0 is served first."""

    name: str
    tenant_class: str
    priority: int
    label: str


class Tenants:
    """priorities: class name → priority, 0 is served first. labels: all that metrics may ever show."""

    def __init__(self, priorities: Mapping[str, int], classes: Mapping[str, str]) -> None:
        """classes: tenant → class. Raises ValueError without a row `default` or with a row `other`, KeyError
        for a class without priority."""
        if DEFAULT not in classes or OTHER in classes:
            raise ValueError(f"tenants: a row {DEFAULT!r} is needed, and {OTHER!r} can't be one")
        self.priorities = dict(priorities)
        self._rows = {name: Tenant(name, of, self.priorities[of], name) for name, of in classes.items()}
        usual = self._rows[DEFAULT]
        self._other = Tenant(usual.name, usual.tenant_class, usual.priority, OTHER)
        self.labels = (*self._rows, OTHER)

    def of(self, name: str | None) -> Tenant:
        """The tenant of a request that gave this name in its header, or none."""
        return self._rows.get(name, self._other) if name else self._rows[DEFAULT]
