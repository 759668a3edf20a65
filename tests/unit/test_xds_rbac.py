"""RBAC from intentions agrees with `decide` for every caller, named or not."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from intentions.model import Action, Intention
from intentions.precedence import decide
from mesh.xds import names, rbac

TD = "td.consul"
NAMES = ["web", "web2", "w.b", "chat", "*"]
intention = st.builds(
    Intention,
    destination=st.sampled_from(["chat", "other", "*"]),
    source=st.sampled_from(NAMES),
    action=st.sampled_from(Action),
)


def admits(rules: dict, spiffe: str) -> bool:
    """Envoy's meaning of an ALLOW policy set, for principals of the three shapes that we use."""

    def is_it(principal: dict) -> bool:
        if "and_ids" in principal:
            return all(is_it(p) for p in principal["and_ids"]["ids"])
        if "not_id" in principal:
            return not is_it(principal["not_id"])
        regex = principal["authenticated"]["principal_name"]["safe_regex"]["regex"]
        return re.fullmatch(regex, spiffe) is not None

    assert rules["action"] == "ALLOW"
    return any(is_it(p) for policy in rules["policies"].values() for p in policy["principals"])


@given(
    st.lists(intention, max_size=8),
    st.sampled_from([*NAMES[:-1], "stranger", "wxb"]),
    st.sampled_from(["cn", "us"]),
)
def test_a_caller_gets_in_exactly_when_the_intentions_say_so(rows, caller, dc) -> None:
    rules = rbac.rules(tuple(rows), "chat", TD)
    assert admits(rules, names.spiffe(caller, dc, TD)) == decide(rows, caller, "chat").allowed


@given(st.lists(intention, max_size=8))
def test_another_trust_domain_never_gets_in(rows) -> None:
    rules = rbac.rules(tuple(rows), "chat", TD)
    assert not admits(rules, names.spiffe("web", "cn", "tdxconsul"))


def test_no_intentions_means_nobody() -> None:
    assert rbac.rules((), "chat", TD)["policies"] == {}
    assert rbac.nobody()["policies"] == {}
