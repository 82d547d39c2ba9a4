"""Signals to a process that is about to end."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import asyncio, os, signal
from engine.signals import handle_signals

heard = []
set_to = signal.signal


def set_and_signalled(number, handler):
    before = set_to(number, handler)
    if heard and number in NUMBERS:
        os.kill(os.getpid(), number)  # the worst moment
    return before


signal.signal = set_and_signalled
loop = asyncio.new_event_loop()


async def main():
    handlers = {number: lambda number=number: heard.append(number) for number in NUMBERS}
    with handle_signals(handlers):
        for number in NUMBERS:
            os.kill(os.getpid(), number)
        while len(heard) < len(NUMBERS):
            await asyncio.sleep(0)
    all_again()


def all_again():
    for number in NUMBERS:
        os.kill(os.getpid(), number)


NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
loop.run_until_complete(main())
asyncio.SelectorEventLoop.__base__.close(loop)  # close() begins with it
all_again()
loop.close()
all_again()
print("to its end")
"""


def test_signals_during_the_end_are_ignored() -> None:
    """While handlers are removed, while the loop closes, and afterwards."""
    done = subprocess.run(
        (sys.executable, "-c", PROGRAM), capture_output=True, timeout=60, check=False
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, b"to its end\n", b"")
