"""The layout of the hash space: who owns which run, and how it changes with the fewest sessions moved.

Law: pure. A layout is a tuple of runs (owner, weight) over [0, FULL) basis points; the place of a run is the
sum of the weights before it, so a session (hash modulo FULL) keeps its owner while its run keeps its place.

Why state: no function of the weights alone can move only what has to move between three regions (the best
possible one loses up to 2x: Angel & Spinka, "Pairwise optimal coupling"); so the next layout is made from the
last one, and the last one is kept in the status document in Consul.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from mesh.model import CANARY, FULL, STABLE

Owner = tuple[str, str]
"""(region, stage)"""
Run = tuple[Owner, int]
Layout = tuple[Run, ...]

MAX_RUNS = 64
"""A layout more broken up than this is laid out afresh; sessions move once, and the plan's reason says so."""


def apportion(shares: Mapping[str, float], total: int) -> dict[str, int]:
    """Integers proportional to `shares`, adding up to `total` (largest remainder, ties by name)."""
    whole = sum(shares.values())
    exact = {name: total * share / whole for name, share in shares.items()}
    floor = {name: int(value + 1e-9) for name, value in exact.items()}
    rest = total - sum(floor.values())
    for name in sorted(shares, key=lambda n: (floor[n] - exact[n], n))[:rest]:
        floor[name] += 1
    return floor


def spread(weights: Mapping[str, int], total: int) -> dict[str, int]:
    """`total` of the sum of `weights` in their proportion, none more than its weight; with a larger total
    nobody gets less (Webster's divisors, ties by name). Largest remainders may take one away while the whole
    grows, and a session would go back to stable while the canary grows.
    """
    whole = sum(weights.values())
    out = {name: (2 * total * weight + whole) // (2 * whole) for name, weight in weights.items()}
    names = sorted(weights)
    while sum(out.values()) < total:
        out[max(names, key=lambda n: Fraction(weights[n], 2 * out[n] + 1))] += 1
    while sum(out.values()) > total:
        given = [n for n in reversed(names) if out[n]]
        out[min(given, key=lambda n: Fraction(weights[n], 2 * out[n] - 1))] -= 1
    return out


def targets(shares: Mapping[str, float], canary: float) -> dict[Owner, int]:
    """Basis points that each (region, stage) should own. Regions first: a canary change crosses none."""
    by_region = apportion(shares, FULL)
    total_canary = round(canary * FULL)
    weighted = {r: w for r, w in by_region.items() if w}
    by_canary = spread(weighted, total_canary)
    out: dict[Owner, int] = {}
    for region in sorted(weighted):
        out[(region, CANARY)] = by_canary[region]
        out[(region, STABLE)] = by_region[region] - by_canary[region]
    return {owner: weight for owner, weight in out.items() if weight > 0}


def canonical(want: Mapping[Owner, int]) -> Layout:
    """Region after region, canary before stable: the layout of a mesh without a past."""
    return tuple((owner, want[owner]) for owner in sorted(want) if want[owner] > 0)


def relayout(last: Layout, want: Mapping[Owner, int]) -> Layout:
    """The layout with the weights of `want` that moves the least from `last`.

    Exactly sum(max(0, last - want)) basis points change owner, inside a region before across regions.
    `want` must add up to FULL (ValueError); a `last` that doesn't, or that is broken into more than MAX_RUNS,
    counts as no past and gives the canonical layout.
    """
    if sum(want.values()) != FULL:
        raise ValueError(f"weights add up to {sum(want.values())}, wanted {FULL}")
    if sum(w for _, w in last) != FULL or min(w for _, w in last) <= 0 or len(last) > MAX_RUNS:
        return canonical(want)
    runs = list(last)
    for source, target, amount in _transfers(last, want):
        _move(runs, source, target, amount)
    return merged(runs)


def owned(layout: Layout) -> dict[Owner, int]:
    """Basis points by owner."""
    out: dict[Owner, int] = {}
    for owner, weight in layout:
        out[owner] = out.get(owner, 0) + weight
    return out


def moved(before: Layout, after: Layout) -> int:
    """Basis points of the hash space whose owner differs between the two layouts."""
    marks = sorted(set(_edges(before)) | set(_edges(after)))
    total, start = 0, 0
    for end in marks:
        if _owner_at(before, start) != _owner_at(after, start):
            total += end - start
        start = end
    return total


def _transfers(last: Layout, want: Mapping[Owner, int]) -> list[tuple[Owner, Owner, int]]:
    have = owned(last)
    surplus = {o: have[o] - want.get(o, 0) for o in sorted(have) if have[o] > want.get(o, 0)}
    deficit = {o: want[o] - have.get(o, 0) for o in sorted(want) if want[o] > have.get(o, 0)}
    out: list[tuple[Owner, Owner, int]] = []
    # Same region first, then the same stage in another region, then whatever is left: a person's session
    # should see the smallest change that does the job.
    for fits in (lambda s, t: s[0] == t[0], lambda s, t: s[1] == t[1], lambda s, t: True):
        for source in surplus:
            for target in deficit:
                amount = min(surplus[source], deficit[target])
                if amount and fits(source, target):
                    out.append((source, target, amount))
                    surplus[source] -= amount
                    deficit[target] -= amount
    return out


def _move(runs: list[Run], source: Owner, target: Owner, amount: int) -> None:
    """Give `amount` of source's space to target, trying first what makes no new run."""
    while amount:
        amount -= (
            _at_border(runs, source, target, amount)
            or _whole(runs, source, target, amount)
            or _split(runs, source, target, amount)
        )


def _at_border(runs: list[Run], source: Owner, target: Owner, amount: int) -> int:
    """Shift the border between two neighbouring runs; 0 when they are nowhere neighbours."""
    for i, (owner, weight) in enumerate(runs):
        for j in (i - 1, i + 1):
            if owner == source and 0 <= j < len(runs) and runs[j][0] == target:
                step = min(amount, weight)
                runs[j] = (target, runs[j][1] + step)
                runs[i] = (source, weight - step)
                if weight == step:
                    del runs[i]
                return step
    return 0


def _whole(runs: list[Run], source: Owner, target: Owner, amount: int) -> int:
    """Hand over the largest run that fits whole; 0 when none does."""
    fitting = [(w, -i) for i, (owner, w) in enumerate(runs) if owner == source and w <= amount]
    if not fitting:
        return 0
    weight, negative = max(fitting)
    runs[-negative] = (target, weight)
    return weight


def _split(runs: list[Run], source: Owner, target: Owner, amount: int) -> int:
    """Cut the end off the largest run; the only step that adds a run."""
    weight, negative = max((w, -i) for i, (owner, w) in enumerate(runs) if owner == source)
    runs[-negative] = (source, weight - amount)
    runs.insert(1 - negative, (target, amount))
    return amount


def merged(runs: Sequence[Run]) -> Layout:
    """Neighbouring runs of one owner as one run; empty runs dropped."""
    out: list[Run] = []
    for owner, weight in runs:
        if weight and out and out[-1][0] == owner:
            out[-1] = (owner, out[-1][1] + weight)
        elif weight:
            out.append((owner, weight))
    return tuple(out)


def _edges(layout: Layout) -> list[int]:
    edges, place = [], 0
    for _, weight in layout:
        place += weight
        edges.append(place)
    return edges


def _owner_at(layout: Layout, place: int) -> Owner | None:
    for owner, weight in layout:
        if place < weight:
            return owner
        place -= weight
    return None
