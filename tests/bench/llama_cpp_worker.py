"""The part of `tests.bench.cpu_llama` that runs llama.cpp, by a Python that has `llama_cpp` and not
this project.

It takes a GGUF file and a number of threads, reads commands as lines of JSON and answers each with
one: seconds by the wall and of processor time of all its threads.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp


class Sequence:
    """A context of llama.cpp with one sequence, which greedy decoding extends."""

    def __init__(self, model: Any, threads: int, size: int) -> None:
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = size, 512, 512
        options.n_threads = options.n_threads_batch = threads
        self._context = llama_cpp.llama_new_context_with_model(model, options)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        assert self._context, "llama.cpp made no context"

    def clear(self) -> None:
        """Forget all tokens."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def run(self, tokens: list[int]) -> None:
        """Compute tokens behind those before; logits are of the last."""
        for first in range(0, len(tokens), 512):
            part = tokens[first : first + 512]
            ids = (ctypes.c_int32 * len(part))(*part)  # a batch has its address alone
            batch = llama_cpp.llama_batch_get_one(ids, len(part))
            code = llama_cpp.llama_decode(self._context, batch)
            assert code == 0, f"llama_decode returned {code}"

    def logits(self) -> Any:
        """Return the last token's logits, an array of C floats."""
        found = llama_cpp.llama_get_logits_ith(self._context, -1)
        return (ctypes.c_float * self._vocab).from_address(ctypes.addressof(found.contents))

    def decode(self, count: int) -> list[int]:
        """Return so many tokens, each the likeliest."""
        chosen = []
        for _ in range(count):
            chosen.append(llama_cpp.llama_sampler_sample(GREEDY, self._context, -1))
            self.run(chosen[-1:])
        return chosen


GREEDY = llama_cpp.llama_sampler_init_greedy()
SILENT = llama_cpp.llama_log_callback(lambda *_: None)


def main() -> None:
    path, threads = sys.argv[1], int(sys.argv[2])
    llama_cpp.llama_log_set(SILENT, None)
    llama_cpp.llama_backend_init()
    options = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_load_model_from_file(path.encode(), options)
    assert model, f"llama.cpp does not load {path}"
    held: dict[str, Sequence] = {}
    for line in sys.stdin:
        command = json.loads(line)
        sequence = held.get(command["name"])
        if sequence is None:
            sequence = held[command["name"]] = Sequence(model, threads, command["size"])
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        chosen: list[int] = []
        if "prompt" in command:
            sequence.clear()
            sequence.run(command["prompt"])
        else:
            chosen = sequence.decode(command["decode"])
        took = (time.perf_counter() - began_s, time.process_time() - began_cpu_s)
        if "logits" in command:
            Path(command["logits"]).write_bytes(bytes(sequence.logits()))
        print(json.dumps({"took": took, "chosen": chosen}), flush=True)


if __name__ == "__main__":
    main()
