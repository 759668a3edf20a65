"""Intentions read in the primary and from the local copy: the newer one holds, and nothing flaps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mesh.controlplane.two_copies import TwoCopies


class Seen:
    def __init__(self) -> None:
        self.told: list[int] = []
        self.reachable = True
        self.both: TwoCopies[int] = TwoCopies(self.told.append, lambda: self.reachable)


def test_the_original_is_heard_and_the_late_copy_changes_nothing() -> None:
    seen = Seen()
    for value in (1, 2, 1):  # there and back, before the copy has moved
        seen.both.original(value)
    seen.both.copy(2)
    seen.both.copy(1)
    assert seen.told == [1, 2, 1, 1, 1]


def test_the_copy_holds_while_the_original_does_not_answer() -> None:
    seen = Seen()
    seen.reachable = False
    seen.both.copy(1)
    assert seen.told == [1]
    seen.reachable = True
    seen.both.original(2)
    seen.reachable = False
    assert seen.told[-1] == 2, "what was known of the original stays"
    seen.both.copy(3)
    assert seen.told[-1] == 3


def test_in_the_primary_itself_there_is_one_copy() -> None:
    def never() -> bool:
        raise AssertionError("there is no original to be reached")

    told: list[int] = []
    both: TwoCopies[int] = TwoCopies(told.append, never)
    both.copy(1)
    both.copy(2)
    assert told == [1, 2]


@given(st.lists(st.tuples(st.sampled_from(["write", "hear", "copy", "cut", "mend"]), st.integers(0, 3))))
def test_once_both_have_caught_up_the_last_write_is_in_force(script: list[tuple[str, int]]) -> None:
    """write: in the primary. hear: the original's watch answers. copy: the copy takes one more write."""
    seen, writes, copied = Seen(), [0], 0
    heard = -1

    def hear() -> None:
        nonlocal heard
        if seen.reachable and writes[-1] != heard:
            heard = writes[-1]
            seen.both.original(heard)

    def copy() -> None:
        nonlocal copied
        if copied < len(writes) - 1:
            copied += 1
            if writes[copied] != writes[copied - 1]:
                seen.both.copy(writes[copied])

    seen.both.copy(0)
    for act, value in script:
        if act == "write":
            writes.append(value)
        elif act in ("cut", "mend"):
            seen.reachable = act == "mend"
        else:
            hear() if act == "hear" else copy()
    seen.reachable = True
    hear()
    for _ in writes:
        copy()
    assert seen.told[-1] == writes[-1]
