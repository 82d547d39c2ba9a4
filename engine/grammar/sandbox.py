"""Compiling a grammar where it may fail: a process of its own, with bounds on time and memory.

llguidance's own fuel bounds most of what a hostile schema can ask for; the process bounds the rest,
and a parser that runs out of stack takes nothing with it but itself. `GrammarSandbox` is the near
end, used by one thread of `engine.grammar.compiler`; `python -m engine.grammar.sandbox` is the far
one. It answers only whether and why not: who passed is compiled again in the engine, at known cost.
"""

from __future__ import annotations

import os
import resource
import select
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from engine.api import Clock, Grammar
from engine.errors import RequestRefused
from engine.grammar.grammar import GrammarLimits, Vocabulary, compile_grammar

READ_BYTES: Final = 1 << 16
LOAD_S_MAX: Final = 60.0
"""For reading the tokenizer, on a busy machine."""


class SandboxSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """What a trial is held to. `cpu_s_max` and `wall_s_max` are of one grammar, `memory_mib_max` is
    what it may take beyond the vocabulary's own."""

    tokenizer_path: str
    vocab_size: int
    end_token_ids: tuple[int, ...]
    limits: GrammarLimits = GrammarLimits()
    cpu_s_max: int = 2
    wall_s_max: float = 10.0
    memory_mib_max: int = 96


class Verdict(Struct, frozen=True, forbid_unknown_fields=True):
    """`code` is empty where the grammar compiles; `held_bytes`: about what that took."""

    code: str = ""
    message: str = ""
    held_bytes: int = 0


class GrammarSandbox:
    """A process that tries grammars, one at a time; started when needed, and again when it died."""

    def __init__(self, settings: SandboxSettings, clock: Clock) -> None:
        self.settings = settings
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._read = b""

    def check(self, grammar: Grammar) -> int:
        """Return about how many bytes the compiled grammar holds.

        Waits `wall_s_max` at most, and for a start where one is due. Raises RequestRefused.
        """
        try:
            return self._check(grammar)
        except OSError as error:
            self.close()
            raise _too_big("more than it may") from error

    def kill(self) -> None:
        """Whoever waits for a verdict has none now. From any thread."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process, self._read = self._process, None, b""
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        process.wait()

    def _check(self, grammar: Grammar) -> int:
        if self._process is None:
            self._start()
        self._write(msgspec.json.encode(grammar))
        line = self._line(self.settings.wall_s_max)
        if line is None:
            self.close()
            raise _too_big(f"more than {self.settings.cpu_s_max} s of computing or its memory")
        verdict = msgspec.json.decode(line, type=Verdict)
        if verdict.code:
            raise RequestRefused(verdict.code, verdict.message)
        return verdict.held_bytes

    def _start(self) -> None:
        self._process = subprocess.Popen(
            (sys.executable, "-m", "engine.grammar.sandbox"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # a terminal's interrupt is for the gateway to decide about
        )
        self._write(msgspec.json.encode(self.settings))
        if self._line(LOAD_S_MAX) is None:
            self.close()
            raise RequestRefused(
                "grammar_unsupported", "This model's tokenizer cannot be used with a grammar."
            )

    def _write(self, line: bytes) -> None:
        assert self._process is not None, "a trial is written to while its process lives"
        assert self._process.stdin is not None, "the process was started with a pipe"
        self._process.stdin.write(line + b"\n")

    def _line(self, wait_s: float) -> bytes | None:
        """The next line; None if the process ended or the time did."""
        assert self._process is not None, "a trial is read from while its process lives"
        assert self._process.stdout is not None, "the process was started with a pipe"
        fd = self._process.stdout.fileno()
        until_s = self._clock() + wait_s
        while b"\n" not in self._read:
            left_s = until_s - self._clock()
            if left_s <= 0 or not select.select([fd], [], [], left_s)[0]:
                return None
            data = os.read(fd, READ_BYTES)
            if not data:
                return None
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return line


def _too_big(what: str) -> RequestRefused:
    return RequestRefused("grammar_too_big", f"Compiling the grammar took {what}.")


# --- the far end -------------------------------------------------------------------------------


def main() -> None:
    """Read settings, then grammars, a line each; answer each with a verdict."""
    lines = sys.stdin.buffer
    settings = msgspec.json.decode(lines.readline(), type=SandboxSettings)
    vocabulary = Vocabulary.load(
        Path(settings.tokenizer_path), settings.vocab_size, settings.end_token_ids, settings.limits
    )
    _limit_memory(settings.memory_mib_max)
    _answer(Verdict())
    for line in lines:
        _limit_cpu(settings.cpu_s_max)
        _answer(_verdict(msgspec.json.decode(line, type=Grammar), vocabulary))


def _verdict(grammar: Grammar, vocabulary: Vocabulary) -> Verdict:
    before = _resident_bytes()
    try:
        compiled = compile_grammar(grammar, vocabulary)
    except RequestRefused as refusal:
        return Verdict(refusal.code, refusal.message)
    held_bytes = max(0, _resident_bytes() - before) + compiled.first_mask.nbytes
    return Verdict(held_bytes=held_bytes + len(grammar.text))


def _answer(verdict: Verdict) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(verdict) + b"\n")
    sys.stdout.buffer.flush()


def _limit_memory(mib_max: int) -> None:
    """From now on the address space may grow by so much; what asks for more, dies."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + mib_max * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_cpu(seconds: int) -> None:
    """The kernel ends the process when it has computed so much longer (whole seconds)."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + seconds + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
