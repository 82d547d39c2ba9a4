"""The compiled C kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.cpu import build


@pytest.fixture(scope="session")
def library() -> Path:
    """Return the path of the compiled kernels; skips the test without a compiler."""
    found = build.compile_library()
    if found is None:
        pytest.skip("no C compiler")
    return found
