"""Heavy packages on request: what the lock says, what is missing, what a failure looks like."""

from __future__ import annotations

import pytest

from mesh import extras
from regions.cli.errors import UsageError, WeirError


def test_a_lock_file_is_read_without_its_comments() -> None:
    text = "# made by hand\ntorch==2.13.0\n\nnumpy==2.4.6  # for gguf\n"
    assert extras.pins(text) == {"torch": "2.13.0", "numpy": "2.4.6"}


def test_what_is_not_installed_in_that_version_is_missing() -> None:
    wanted = {"pytest": pytest.__version__, "no-such-package-here": "1.0"}
    assert extras.missing(wanted) == ("no-such-package-here",)
    assert extras.missing({"pytest": "0.0.1"}) == ("pytest",)


def test_the_shipped_lock_pins_torch_and_names_no_address() -> None:
    text = extras.lock_file().read_text()
    assert "torch" in extras.pins(text)
    assert "://" not in text
    assert "nvidia-c" not in text


def test_an_unknown_extra_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="torch"):
        extras.install("cobol", print)


def test_a_failing_pip_says_the_end_of_what_it_said() -> None:
    with pytest.raises(WeirError, match="no-such-package-here"):
        extras._pip("--no-index", "no-such-package-here==1.0")
