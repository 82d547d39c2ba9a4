"""The table of `make clients`: what counts as a failure, and what a broken program says."""

from __future__ import annotations

from tests.clients.__main__ import ClientResult, read_output, table
from tests.clients.environments import FAMILIES

OUTPUT = """noise of a client
{"versions": {"litellm": "1.106.2"}}
{"case": "unary", "passed": true, "reason": "", "theirs": ""}
{"case": "turn", "passed": false, "reason": "BadRequestError: no", "theirs": ""}
{"case": "session", "passed": true, "reason": "", "theirs": "", "told": "read 9 of 10"}
{"case": "stored", "passed": false, "reason": "400", "theirs": "nothing is stored"}
"""


def result(output: str = OUTPUT, status: int = 0) -> ClientResult:
    return read_output("litellm", output, status, "Killed", 2.0)


def test_known_reasons_are_no_failures() -> None:
    """The exit status follows `ours`."""
    one = result()

    assert [case.case for case in one.ours] == ["turn"]
    assert [case.case for case in one.theirs] == ["stored"]


def test_table_has_versions_counts_and_reasons() -> None:
    """A failure's reason is below the table."""
    text = table([result()])

    assert "| litellm | litellm 1.106.2 | 4 | 2 | 1 | 1 | 2 |" in text
    assert "FAILED litellm, turn: BadRequestError: no" in text
    assert "known litellm, stored: nothing is stored" in text
    assert "measured litellm, session: read 9 of 10" in text


def test_a_program_that_breaks_off_has_failed() -> None:
    """Its last cases are missing, not passed."""
    assert result(status=-9).ours[-1].reason == "exit status -9: Killed"
    assert result(output="").ours[-1].case == "program"


def test_each_family_has_its_program_and_packages() -> None:
    """An unpinned version would change what the table says."""
    for family in FAMILIES:
        text = family.packages.read_text()
        lines = [line for line in text.splitlines() if family.packages.suffix == ".txt"]
        assert (family.packages.parent / family.program).exists()
        assert all("==" in line for line in lines)
        assert "^" not in text
