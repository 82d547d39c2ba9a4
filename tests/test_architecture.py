"""Rules that a linter cannot hold: names, sizes, rooms, escapes from the checkers.

The lists below are ratchets. They may shrink at any time and grow only with a reason on the line.
"""

from __future__ import annotations

import ast
import gc
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.tables import each_row
from tests.tools.private_names import imported, inherited, nodes, reached_into

ROOT = Path(__file__).parent.parent
FOLDERS = ("gateway", "engine", "kernels", "tenancy")
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 800
FOLDER_FILES_MAX = 12

LONGER_FUNCTIONS: dict[str, str] = {
    "kernels/gpu/hopper_attention.py:_consume": "one kernel, whose state lives in registers",
}
"""Functions over `FUNCTION_LINES_MAX` lines, each with its reason."""

LARGER_FOLDERS: dict[str, str] = {
    "gateway/api": "one group of routes per file, named as in their paths",
    "gateway/api/admin": "one group of routes per file, named as in their paths",
    "kernels/cpu": "eleven C files and their header are compiled as one library",
}
"""Product folders with more than `FOLDER_FILES_MAX` source files, each with its reason."""

TOP_LEVEL = frozenset(
    {
        *(".ci", ".dockerignore", ".gitignore", "ARCHITECTURE.md", "CHANGELOG.md"),
        *("CONTRIBUTING.md", "Dockerfile", "LICENSE", "Makefile", "README.md", "THREAT_MODEL.md"),
        *("compose.yaml", "constraints.txt", "deploy", "docs", "engine", "examples", "gateway"),
        *("kernels", "pyproject.toml", "tenancy", "tests"),
    }
)

CONTEXT_TAKERS_MAX = 9
"""How many functions may take all parts of a gateway."""

ESCAPES_MAX = {"type: ignore": 0, "noqa": 0, "pragma: no cover": 0}
"""How many comments in the product may silence a checker."""

DOCUMENTED = {
    "_request_id": "both SDKs document it as public",
    "_reinterpret": "Gluon's own guide uses it; Triton 3.9 renames it to reinterpret",
}
"""Names of dependencies that begin with an underscore and are documented all the same."""

OWN_PRIVATES = {
    "engine/scheduler/request_table.py": "_by_namespace",
    "engine/server/embedded.py": "_call_in_loop _on_service_change",
    "gateway/prompt/opaque_text.py": "_fail_read _is_whole _recorder _text",
    "gateway/prompt/sandbox.py": "_count_value _spend",
    "tests/fake_levels.py": "_last",
    "tests/unit/engine/cache/test_checker.py": "_manager _nodes _spare",
    "tests/unit/engine/core/test_attention_windows.py": "_commit_tail",
    "tests/unit/engine/kv/test_device_transfer.py": "_may_begin",
    "tests/unit/engine/levels/test_crowding.py": "_waits_for_moves",
    "tests/unit/engine/levels/test_host_accounts.py": "_may_go",
    "tests/unit/engine/storage/test_store.py": "_drop _index",
    "tests/unit/gateway/analytics/test_client.py": "_child _process _wire",
    "tests/unit/gateway/embeddings/test_embedder.py": "_ids",
    "tests/unit/gateway/ledger/test_deferred_holds.py": "_ledger",
    "tests/unit/tenancy/ledger/test_writer.py": "_writer _writer_id",
}
"""Private attributes of another object that a file uses; our own classes define all of them."""


VENDORS_NAMED = {
    "engine/model_store/catalogue.py": "the licence of a model",
    "engine/processes.py": "variables of the environment that hold keys of buckets",
}
"""Product files outside gateway/dialects that name a vendor of APIs, each with its reason."""


@cache
def sources(*folders: str) -> tuple[Path, ...]:
    """Every Python file below these folders."""
    return tuple(path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text())


@pytest.fixture(autouse=True, scope="module")
def kept_trees() -> Iterator[None]:
    """Keep the trees of all files, without the garbage collector, which would look at their
    millions of nodes again and again: three quarters of these tests' time."""
    gc.disable()
    yield
    parsed.cache_clear()
    nodes.cache_clear()
    gc.enable()


def packages(*folders: str) -> list[Path]:
    """Every package below these folders, themselves included."""
    return sorted({path.parent for path in sources(*folders)})


def rooms() -> list[Path]:
    """Packages of the second level such as gateway/http, and kernels as one."""
    below = [path for path in packages(*FOLDERS) if len(path.relative_to(ROOT).parts) == 2]
    return [*(path for path in below if path.parent.name != "kernels"), ROOT / "kernels"]


def folders_of_tests() -> list[Path]:
    """The folders of tests/; tests/unit mirrors the packages and counts as one."""
    parts = [path.relative_to(ROOT / "tests").parts for path in sources("tests")]
    return sorted({ROOT / "tests" / part[0] for part in parts if len(part) > 1})


def name_of(path: Path) -> str:
    """The path from the repository's root."""
    return path.relative_to(ROOT).as_posix()


def test_the_top_level_is_fixed() -> None:
    """What a tool leaves there is not for the repository: a file of megabytes was added so."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout: no file is tracked")

    assert {line.partition("/")[0] for line in listed.stdout.splitlines()} == TOP_LEVEL


def test_files_are_named_after_nouns() -> None:
    """utils, helpers and common collect code without a home."""
    vague = {"utils", "util", "helpers", "common", "misc", "base"}

    assert [name_of(path) for path in sources(*FOLDERS, "tests") if path.stem in vague] == []


def test_modules_have_docstrings() -> None:
    """The docstring is the first thing a newcomer reads."""
    files = sources(*FOLDERS, "tests")

    assert [name_of(path) for path in files if not ast.get_docstring(parsed(path))] == []


def test_functions_fit_a_screen() -> None:
    """A function over 70 lines holds more than one thought."""
    longer = {
        f"{name_of(path)}:{node.name}": lines
        for path in sources(*FOLDERS, "tests")
        for node in nodes(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES_MAX
    }

    assert longer.keys() == LONGER_FUNCTIONS.keys(), longer


def test_files_over_800_lines_are_split_by_noun() -> None:
    """There is no smaller cap: a noun is not cut in two for its size."""
    lines = {name_of(path): len(path.read_text().splitlines()) for path in sources(*FOLDERS)}

    assert {name: count for name, count in lines.items() if count > FILE_LINES_MAX} == {}


def test_folders_hold_about_a_dozen_files() -> None:
    """A larger folder hides a noun that deserves a folder."""
    files = {
        name_of(folder): [
            path.name
            for path in folder.iterdir()
            if path.suffix in (".py", ".c", ".h", ".js", ".sql") and path.name != "__init__.py"
        ]
        for top in FOLDERS
        for folder in (ROOT / top, *(ROOT / top).rglob("*/"))
    }
    larger = {name: found for name, found in files.items() if len(found) > FOLDER_FILES_MAX}

    assert larger.keys() == LARGER_FOLDERS.keys(), larger


def test_only_dialects_name_vendors() -> None:
    """A dialect is a package: another one needs no change outside gateway/dialects."""
    vendors = re.compile("openai|anthropic|gemini|google", re.IGNORECASE)
    outside = (path for path in sources(*FOLDERS) if "dialects" not in path.parts)
    found = {name_of(path) for path in outside if vendors.search(path.read_text())}

    assert found == VENDORS_NAMED.keys()


def test_rooms_take_what_they_need() -> None:
    """A signature with all parts of a gateway tells nothing of what a room needs."""
    takers = [
        f"{name_of(path)}:{node.name}"
        for path in sources("gateway")
        for node in nodes(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for given in (*node.args.args, *node.args.kwonlyargs)
        if given.annotation is not None and ast.unparse(given.annotation) == "Context"
    ]

    assert len(takers) <= CONTEXT_TAKERS_MAX, takers


def test_public_class_names_are_unique() -> None:
    """A search for a class name finds one definition."""
    found: dict[str, list[str]] = {}
    for path in sources(*FOLDERS):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(name_of(path))

    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_rooms_have_readmes() -> None:
    """A newcomer learns what a folder owns, what it may not know and where to begin reading."""
    assert [name_of(room) for room in rooms() if not (room / "README.md").exists()] == []


def test_the_architecture_page_has_a_line_for_every_folder() -> None:
    """The map names each room."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = set(re.findall(r"^[-|\s]*`?([a-z0-9_/]+)/`?\s", text, re.MULTILINE))

    folders = {name_of(folder) for folder in (*packages(*FOLDERS), *folders_of_tests())}
    assert (folders | {"deploy", "docs", "examples"}) - named == set()


def test_the_architecture_page_names_no_folder_that_is_gone() -> None:
    """A map that shows a missing room misleads."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = re.findall(
        r"^[-|\s]*`?((?:gateway|engine|tenancy|kernels|tests|deploy|docs|examples)[a-z0-9_/]*)/`?\s",
        text,
        re.MULTILINE,
    )

    assert [name for name in named if not (ROOT / name).is_dir()] == []


def test_what_the_architecture_page_says_to_begin_at_exists() -> None:
    """A renamed function would send its reader on a search."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rows = re.findall(r"^\| .* \| `(\S+\.py)` \| `(?:(\w+)\.)?(\w+)` \|$", text, re.MULTILINE)

    assert len(rows) == 12
    for path, owner, name in rows:
        code = (ROOT / path).read_text()
        assert re.search(rf"^{'    ' if owner else ''}(async )?def {name}\(", code, re.M), name
        assert not owner or re.search(rf"^class {owner}\b", code, re.M), owner


def test_no_comment_silences_a_checker() -> None:
    """Each would be a place where a checker was told to look away."""
    for escape, most in ESCAPES_MAX.items():
        found = [
            f"{name_of(path)}:{number}"
            for path in sources(*FOLDERS)
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if f"# {escape}" in line
        ]
        assert len(found) <= most, found


def test_all_lists_names_that_exist() -> None:
    """Each name in a package's `__all__` can be imported from it."""
    for path in sources(*FOLDERS):
        if path.name == "__init__.py":
            module = importlib.import_module(".".join(path.parent.relative_to(ROOT).parts))
            for name in getattr(module, "__all__", ()):
                assert hasattr(module, name), f"{module.__name__}.{name}"


def test_the_brain_runs_without_torch() -> None:
    """Scheduling and caching must be testable in microseconds, and startable without a device."""
    program = (
        "import sys, engine.core.core, engine.cache, tenancy, gateway.app;"
        "sys.exit(1 if {'torch', 'triton'} & set(sys.modules) else 0)"
    )

    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_one_gateway_needs_no_client_of_shared_state() -> None:
    """What several gateways share costs `trunkline serve` nothing at its start."""
    program = (
        "import sys, gateway.cli.serve, gateway.app;"
        "sys.exit(1 if {'redis', 'gateway.shared.valkey'} & set(sys.modules) else 0)"
    )

    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_nothing_deserialises_code() -> None:
    """Pickle and its kin run what they read."""
    banned = re.compile(r"^\s*(import|from)\s+(pickle|dill|marshal|yaml|shelve)\b|torch\.load\(")
    for path in sources(*FOLDERS, "tests"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not banned.search(line), f"{name_of(path)}:{number}"


def test_no_private_name_of_a_dependency_is_imported_or_inherited() -> None:
    """What a dependency keeps to itself changes without notice: with another aiohttp, which
    pyproject.toml allowed, every request got an empty reply."""
    found = {
        name_of(path): names
        for path in sources(*FOLDERS, "tests")
        if (names := [*imported(parsed(path)), *inherited(parsed(path))])
    }

    assert found == {}


def private_attributes(trees: dict[str, ast.Module]) -> dict[str, str]:
    """The private attributes of other objects that each file uses, without `DOCUMENTED` ones."""
    found = {name: set(reached_into(tree)) - DOCUMENTED.keys() for name, tree in trees.items()}
    return {name: " ".join(sorted(names)) for name, names in found.items() if names}


def test_no_private_attribute_of_a_dependency_is_read() -> None:
    """Syntax does not tell a dependency's attribute from ours, so each use is listed."""
    trees = {name_of(path): parsed(path) for path in sources(*FOLDERS, "tests")}

    assert private_attributes(trees) == OWN_PRIVATES
    assert {name for tree in trees.values() for name in reached_into(tree)} >= DOCUMENTED.keys()


PLANTED = {
    "from aiohttp.http_writer import _serialize_headers": "aiohttp.http_writer._serialize_headers",
    "from llguidance._lib import JsonCompileOptions": "llguidance._lib.JsonCompileOptions",
    "import aiohttp._http_writer": "aiohttp._http_writer",
    "pytest.importorskip('opentelemetry.semconv._incubating')": (
        "opentelemetry.semconv._incubating"
    ),
    "from jinja2 import Environment\nclass A(Environment):\n def _parse(self): ...": "A._parse",
    "from aiohttp import web\nclass A(web.AppRunner):\n async def _make_server(self): ...": (
        "A._make_server"
    ),
    "import aiohttp.web_protocol as p\nclass A(p.RequestHandler):\n"
    " def start(self): return self._messages": "A._messages",
    "from argparse import ArgumentParser\nclass A(ArgumentParser):\n"
    " def f(self): return self._actions": "A._actions",
}


@each_row("source", PLANTED)
def test_a_private_name_that_was_planted_is_found(source: str) -> None:
    """The searches above are of no use if they find nothing."""
    tree = ast.parse(source)

    assert [*imported(tree), *inherited(tree)] == [PLANTED[source]]


@pytest.mark.parametrize(
    "source", ["site._server.sockets", "patch.setattr(site, '_server', 1)", "getattr(x, '_server')"]
)
def test_an_attribute_that_was_planted_is_found(source: str) -> None:
    """An attribute, or its name as a string; it is `_server` that some of our classes have too."""
    assert private_attributes({"a.py": ast.parse(source)}) == {"a.py": "_server"}
