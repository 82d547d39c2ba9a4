"""What a disk is good for: measured rates and section by section arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.levels.compute_speed import measure_flops_per_s
from gateway.levels.disk_speed import PIECE_BYTES, measure_disk
from gateway.levels.level_worth import level_worth


def ticks(step_s: float) -> Iterator[float]:
    """Yield a clock's readings, `step_s` apart."""
    now_s = 0.0
    while True:
        yield now_s
        now_s += step_s


def test_disk_is_measured_within_bounds_and_left_as_it_was(tmp_path: Path) -> None:
    """A disk that takes a second for each piece is measured by three of them."""
    readings = ticks(0.5)
    speed = measure_disk(tmp_path, lambda: next(readings))

    assert speed.write_bytes_per_s == 3 * PIECE_BYTES / 2.0
    assert speed.read_bytes_per_s == 3 * PIECE_BYTES / 1.5
    assert list(tmp_path.iterdir()) == []


def test_fast_disk_is_measured_by_so_many_bytes(tmp_path: Path) -> None:
    readings = ticks(0.001)
    speed = measure_disk(tmp_path, lambda: next(readings), bytes_max=4 * PIECE_BYTES)

    assert speed.read_bytes_per_s == pytest.approx(4 * PIECE_BYTES / 0.005)


def test_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        measure_disk(tmp_path / "none", lambda: 0.0)


@pytest.mark.parametrize(
    ("level", "gb_per_s", "tokens"), [("host", 51.9, 9), ("disk", 3.0, None), ("disk", 6.0, 260)]
)
def test_worth_is_the_break_even_against_computing(
    level: str, gb_per_s: float, tokens: int | None
) -> None:
    """25.7 us a token on one H200: memory always wins, its disk in bf16 does not."""
    worth = level_worth(level, 131_072, gb_per_s * 1e9, 1 / 25.7e-6)

    assert worth.tokens_min == (tokens and pytest.approx(tokens, rel=0.02))
    assert (worth.ratio > 1) == (tokens is not None)


def test_products_are_timed() -> None:
    readings = ticks(0.15)

    assert measure_flops_per_s(lambda: next(readings)) == pytest.approx(2 * 768**3 / 0.15)
