"""The contributor's tools: which tests a change selects, which commit messages pass."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.tables import each_row
from tests.tools.changed_checks import FILES, checks_of, dependencies_of, marks_of
from tests.tools.changed_tests import ALWAYS, commit_a_day_before, folders_of
from tests.tools.commit_message import main, problems_of

ROOT = Path(__file__).parents[2]


def test_a_product_file_selects_the_tests_of_its_package() -> None:
    assert folders_of(["engine/cache/blocks/block_pool.py"]) == [*ALWAYS, "tests/unit/engine/cache"]


def test_a_file_of_a_top_level_folder_selects_all_its_unit_tests() -> None:
    """Every package of the engine depends on engine/api.py."""
    assert folders_of(["engine/cache/prefix_cache.py", "engine/api.py"]) == [
        *ALWAYS,
        "tests/unit/engine",
    ]


def test_a_test_file_selects_itself_and_prose_selects_nothing_more() -> None:
    changed = ["tests/unit/test_tools.py", "README.md", "tests/unit/test_gone.py"]

    assert folders_of(changed) == [*ALWAYS, "tests/unit/test_tools.py"]


@pytest.mark.parametrize(
    ("changed", "checks"),
    [
        (["README.md", "gateway/app.py"], []),
        (["deploy/helm/values.yaml", "engine/runner/runner.py"], ["linters", "kernels"]),
        (["kernels/gpu/experts.py"], ["kernels", "compiled"]),
        (["gateway/fleet/keeper.py"], ["crash", "ray"]),
        (["engine/storage/remote/objects.py"], ["buckets", "planted", "crash"]),
        (["constraints.txt"], list(FILES)),
        ([], list(FILES)),
    ],
)
def test_a_change_asks_for_the_checks_that_depend_on_it(
    changed: list[str], checks: list[str]
) -> None:
    """For all of them where nothing can be compared."""
    assert checks_of(changed) == checks


def test_commits_pushed_together_are_compared_together() -> None:
    """The last commit of main alone would leave out what those before it changed."""
    if not (before := commit_a_day_before()):
        pytest.skip("the history has no commit of the day before")

    def instants(of: str) -> list[int]:
        log = ["git", "log", "--format=%ct", of]
        done = subprocess.run(log, cwd=ROOT, capture_output=True, text=True, check=True)
        return [int(line) for line in done.stdout.split()]

    (now, *_), since = instants("HEAD"), instants(f"{before}..HEAD")
    assert instants(before)[0] <= now - 86_400 < min(since)


def test_slow_tests_run_where_what_they_depend_on_changed() -> None:
    some = marks_of(["kernels", "linters", "crash", "ray"])

    assert some == "not (nightly or slow and (attacks or compiled or planted or dashboard))"
    assert marks_of(FILES) == "not (nightly or slow and (attacks))"


def test_settings_of_tools_are_no_dependencies() -> None:
    """A new folder's import contract asks for no check of what is installed."""
    text = '[project]\ndependencies = ["a>=1"]\n[tool.x]\nnumber = {}\n'

    assert dependencies_of(text.format(1)) == dependencies_of(text.format(2))
    assert dependencies_of(text.format(1)) != dependencies_of(text.replace(">=1", ">=2").format(1))


def test_a_check_depends_on_files_that_exist() -> None:
    """A folder that was renamed would never ask for its check."""
    for check, files in FILES.items():
        for begins in files:
            assert list(ROOT.glob(f"{begins.removesuffix('/')}*")), (check, begins)


@pytest.mark.parametrize(
    "subject",
    [
        "a hold comes when something hangs on it",
        "gateway: what most answers need none of is not looked at",
        "engine: fixed the drain",
        "engine: fix the drain timeout.",
        "engine: fix " + "x" * 72,
    ],
)
def test_a_subject_without_folder_or_imperative_verb_is_refused(subject: str) -> None:
    assert problems_of(subject)


@pytest.mark.parametrize(
    "subject", ["engine: capture mixed steps as CUDA graphs", "engine/cache, tests: fix the count"]
)
def test_an_imperative_subject_passes(subject: str) -> None:
    assert problems_of(subject) == []


def test_a_large_commit_needs_a_body() -> None:
    assert problems_of("engine: add a tier", 51)
    assert not problems_of("engine: add a tier\n\nBlocks outlive the engine there.", 51)


def test_the_hook_reads_a_message_without_its_comments(tmp_path: Path) -> None:
    """Git's template stands behind '#'."""
    message = tmp_path / "message"
    message.write_text("# On branch main\nengine: add a tier\n# changed: x\n")

    assert main([str(message)]) == 0


def test_a_table_tries_each_row_and_names_those_that_fail() -> None:
    tried = []

    @each_row(("a", "b"), [(1, 1), (1, 2), (3, 3), (3, 4)])
    def equal(world: str, a: int, b: int) -> None:
        tried.append(f"{world} {a}")
        assert a == b

    with pytest.raises(ExceptionGroup, match="2 of 4 rows") as failed:
        equal(world="w")

    notes = [error.__notes__ for error in failed.value.exceptions]
    assert tried == ["w 1", "w 1", "w 3", "w 3"]
    assert notes == [["in the row a = 1, b = 2"], ["in the row a = 3, b = 4"]]


@each_row("failing", [(), (2,)])
async def test_a_table_awaits_the_rows_of_an_asynchronous_test(failing: tuple[int, ...]) -> None:
    @each_row("number", [1, 2, 3], ids=str)
    async def succeeds(number: int) -> None:
        assert number not in failing

    if not failing:
        await succeeds()
        return
    with pytest.raises(AssertionError) as failed:
        await succeeds()
    assert failed.value.__notes__ == ["in the row number = 2"]
