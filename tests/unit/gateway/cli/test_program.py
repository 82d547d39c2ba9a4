"""The program itself: its start, its version, colours and the completion of shells."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gateway.__main__ import has_colours, main
from gateway.cli.arguments import find_entry
from gateway.cli.commands import COMMANDS

ROOT = Path(__file__).parents[4]
SLOW = {"torch", "aiohttp", "tokenizers", "numpy", "jinja2", "tqdm", "asyncio", "gateway.app"}
IMPORTED = """
import sys
from gateway.__main__ import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
sys.stderr.write(" ".join(sys.modules))
"""


def imported_by(*arguments: str, data: Path) -> set[str]:
    """Return the modules that a command has imported, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=True,
        env={"PYTHONPATH": str(ROOT), "TRUNKLINE_DATA_DIR": str(data)},
    )
    return set(done.stderr.split("\n")[-1].split())


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("tenant", "create", "Wrong!")])
def test_a_command_imports_what_it_needs(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """Half of the start once was the gateway's and the benchmark's imports."""
    found = imported_by(*arguments, data=tmp_path)
    allowed = {"tokenizers"} if arguments[0] == "tenant" else set()

    assert found & SLOW <= allowed
    if arguments[0] != "tenant":
        assert len([name for name in found if name.startswith(("gateway", "tenancy"))]) <= 8


def test_engines_are_started_before_the_gateway_is_imported() -> None:
    """They take longest to be ready, and the rest of the gateway takes most of a second."""
    program = "import sys, gateway.cli.serve; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=True,
    )

    assert set(done.stdout.split()) & SLOW <= {"asyncio", "tokenizers"}


def test_every_command_has_its_entry() -> None:
    """The table names modules by text, which no type checker follows."""
    for name in COMMANDS:
        assert callable(find_entry(name).run), name


def test_version_needs_no_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    """As an option, as every program has it, and as a command."""
    status = main(["--version"])
    option = capsys.readouterr().out
    main(["version"])
    command = capsys.readouterr().out

    assert status == 0
    assert option == command
    assert option.startswith("trunkline ")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_and_options(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of every command, and their actions."""
    status = main(["completion", shell])
    script = capsys.readouterr().out

    assert status == 0
    for word in ("check-config", "group-by", "requests-per-minute", "rotate"):
        assert word in script


def test_completion_of_bash_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    """The shell's own parser reads it."""
    main(["completion", "bash"])
    script = capsys.readouterr().out
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


def test_colours_are_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR turns them off (no-color.org), and a terminal that cannot has none."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    on_terminal, in_pipe = has_colours(True), has_colours(False)
    monkeypatch.setenv("NO_COLOR", "1")
    without = has_colours(True)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")

    assert (on_terminal, in_pipe, without, has_colours(True)) == (True, False, False, False)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("servee", "unknown COMMAND: 'servee'; did you mean 'serve'? (see trunkline --help)"),
        ("tenant crate", "; did you mean 'create'?"),
        ("price", "did you mean 'prices'?"),
        ("budget ada --window moth", "; did you mean 'month'?"),
        ("xyzzy", "invalid choice: 'xyzzy' (choose from 'serve', 'pull'"),
    ],
)
def test_a_misspelt_word_is_answered_with_the_one_that_was_meant(
    words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a misspelt setting is; without a likely one all are named."""
    status = main(words.split())
    line = capsys.readouterr().err

    assert (status, line.count("\n")) == (2, 1)
    assert told in line.replace("from serve, pull", "from 'serve', 'pull'")
