"""The grammar sandbox: a child process that compiles a grammar first, bounded in time and memory.

llguidance's own fuel bounds most costs of a hostile schema; the process bounds the rest, and a
parser that overflows its stack kills only this process. `GrammarSandbox` is the parent's side, used
by one thread of `engine.grammar.compiler`; `python -m engine.grammar.sandbox` is the child. The
child returns a verdict only; a grammar that passes is compiled again in the engine, at known cost.
"""

from __future__ import annotations

import os
import resource
import select
import socket
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from engine.api import Clock, Grammar
from engine.errors import EngineUnavailable, RequestRefused
from engine.grammar.grammar import GrammarLimits, Vocabulary, compile_grammar
from engine.processes import child_environment, end_with_parent, run_child, start_child
from engine.wire import READ_BYTES, Decoder, encode_frame, receive, send

LOAD_S_MAX: Final = 60.0
"""Seconds to read the tokenizer, on a busy machine."""


class SandboxSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The bounds of a trial.

    `cpu_s_max` and `wall_s_max` are for one grammar; `memory_mib_max` is the memory beyond the
    vocabulary's.
    """

    tokenizer_path: str
    vocab_size: int
    end_token_ids: tuple[int, ...]
    limits: GrammarLimits = GrammarLimits()
    cpu_s_max: int = 2
    wall_s_max: float = 10.0
    memory_mib_max: int = 96


class Verdict(Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a trial. `code` is empty if the grammar compiles; `held_bytes`: about its
    memory.
    """

    code: str = ""
    message: str = ""
    held_bytes: int = 0


_read_verdict = msgspec.msgpack.Decoder(Verdict).decode


class GrammarSandbox:
    """A process that compiles one grammar at a time; started on demand, and again after it died."""

    def __init__(self, settings: SandboxSettings, clock: Clock) -> None:
        self.settings = settings
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._killed: subprocess.Popen[bytes] | None = None
        self._wire: socket.socket | None = None
        self._verdicts = Decoder(_read_verdict)

    def check(self, grammar: Grammar) -> int:
        """Return about how many bytes the compiled grammar holds.

        Waits at most `wall_s_max`, plus the start of the process if one is due: its death between
        two grammars is no fault of the next. Raises RequestRefused, and EngineUnavailable if the
        machine has no room for a process.
        """
        try:
            self.prepare()
            return self._check(grammar)
        except OSError as error:
            self.close()
            message = f"No process could be started for the grammar: {type(error).__name__}."
            raise EngineUnavailable("queue_full", message) from error

    def prepare(self) -> None:
        """Start a process unless one runs. Takes as long as reading the tokenizer. Raises OSError,
        and RequestRefused if the tokenizer cannot be used.
        """
        process = self._process
        if process is not None and (process is self._killed or process.poll() is not None):
            self.close()
        if self._process is None:
            self._start()

    def kill(self) -> None:
        """Kill the process; a pending `check` fails. Callable from any thread."""
        process = self._process
        if process is not None:
            self._killed = process  # it may take a while to die
            process.kill()

    def close(self) -> None:
        """End the process if it runs."""
        process, wire, self._process, self._wire = self._process, self._wire, None, None
        if wire is not None:
            wire.close()
        if process is not None:
            process.kill()
            process.wait()

    def _check(self, grammar: Grammar) -> int:
        verdict = self._ask(grammar, self.settings.wall_s_max)
        if verdict is None:
            self.close()
            what = f"more than {self.settings.cpu_s_max} s or too much memory"
            raise RequestRefused("grammar_too_big", f"Compiling the grammar took {what}.")
        if verdict.code:
            raise RequestRefused(verdict.code, verdict.message)
        return verdict.held_bytes

    def _start(self) -> None:
        environment = child_environment(os.environ)
        self._process, self._wire = start_child(
            "engine.grammar.sandbox", environment, stderr=subprocess.DEVNULL
        )
        self._verdicts = Decoder(_read_verdict)
        if self._ask(self.settings, LOAD_S_MAX) is None:
            self.close()
            raise RequestRefused(
                "grammar_unsupported", "This model's tokenizer does not support grammars."
            )

    def _ask(self, message: SandboxSettings | Grammar, wait_s: float) -> Verdict | None:
        """Send a message and return the answer; None if the process ended or the time ran out."""
        wire = self._wire
        assert wire is not None, "the process runs while it is asked"
        wire.sendall(encode_frame(message))
        until_s = self._clock() + wait_s
        while (left_s := until_s - self._clock()) > 0:
            if not select.select([wire], [], [], left_s)[0]:
                break
            try:
                data = wire.recv(READ_BYTES)
            except ConnectionError:
                break
            if not data:
                break
            for verdict in self._verdicts.feed(data):
                return verdict
        return None


# --- the child process -------------------------------------------------------------------------


def serve(wire: socket.socket) -> int:
    """Read the settings, then one grammar after another; send a verdict for each."""
    frames = chain.from_iterable(receive(wire))
    settings = msgspec.msgpack.decode(next(frames), type=SandboxSettings)
    vocabulary = Vocabulary.load(
        Path(settings.tokenizer_path), settings.vocab_size, settings.end_token_ids, settings.limits
    )
    _limit_memory(settings.memory_mib_max)
    send(wire, Verdict())
    for frame in frames:
        _limit_cpu(settings.cpu_s_max)
        send(wire, _verdict(msgspec.msgpack.decode(frame, type=Grammar), vocabulary))
    return 0


def _verdict(grammar: Grammar, vocabulary: Vocabulary) -> Verdict:
    before = _resident_bytes()
    try:
        compiled = compile_grammar(grammar, vocabulary)
    except RequestRefused as refusal:
        return Verdict(refusal.code, refusal.message)
    held_bytes = max(0, _resident_bytes() - before) + compiled.first_mask.nbytes
    return Verdict(held_bytes=held_bytes + len(grammar.text))


def _limit_memory(mib_max: int) -> None:
    """Let the address space grow by `mib_max` from now on; an allocation beyond it fails."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + mib_max * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_cpu(seconds: int) -> None:
    """Have the kernel end the process after so many further seconds of processor time (whole
    seconds).
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + seconds + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    end_with_parent(sys.stdin.fileno())
    sys.exit(run_child("sandbox", serve))
