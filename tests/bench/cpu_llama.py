"""One stream on the CPU beside llama.cpp with the same file, in turns.

    python -m tests.bench.cpu_llama --peer PYTHON [--shape lfm2-350m|lfm2-1.2b]
        [--type q4_0|q8_0|bf16] [--file GGUF] [--rounds N] [--threads N] [--contexts 64,2000]
        [--unpacked] [--folder DIR]

PYTHON is one that imports `llama_cpp` (the package llama-cpp-python); `--unpacked` adds ours with
weights in bf16. Any model's file will do; without one, a file of the shape is written into the
folder, with random values. Its maps are of the type. The head, which is also the embeddings, is
Q6_K beside Q4_0, as in llama.cpp's own files. Each round decodes on contexts of about 64 and 2,000
tokens and computes a prompt of 512, one contender after the other. Printed are the medians with the
least and the most, by the wall and in processor time of all threads, and the correlation of both
models' logits, which tells whether they compute the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

from engine.api import Sampling
from engine.config import EngineConfig, WeightsKind
from engine.model_store import Architecture, prepare
from engine.model_store.tensors import expected_shapes
from engine.models.cpu_decoder import load_kernels
from engine.plan import BegunSequence, Row, StepPlan
from engine.runner.cpu_runner import CpuRunner
from tests.bench.cpu_hybrids import SHAPES
from tests.bench.models import BLOCK
from tests.bench.results import middle_and_spread, print_line
from tests.tiny_tokenizer import MERGES, SPECIALS, TOKENS

CONTEXTS, PROMPT, DECODED = (64, 2000), 512, 24
SIZE, SEQUENCES = 4096, 4
"""Tokens of a sequence's memory, and how many there are: of contexts, prompts and logits."""
SCALE = 0.02
"""Standard deviation of a weight, about."""
HEAD_TYPES = {"q4_0": "Q6_K", "q8_0": "Q8_0", "bf16": "BF16"}


def blocks_of(kind: str, rows: int, columns: int, chance: np.random.Generator) -> Any:
    """Return a random matrix of a GGUF type, [rows, bytes]."""
    if kind == "BF16":
        values = torch.from_numpy(chance.standard_normal((rows, columns), np.float32))
        return (values * SCALE).bfloat16().view(torch.uint8).numpy()
    size, length = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = chance.integers(0, 256, (rows, columns // size, length), np.uint8)
    scale, at = {"Q4_0": (0.0043, 0), "Q8_0": (0.00027, 0), "Q6_K": (1.5e-5, 208)}[kind]
    blocks[..., at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def write_gguf(shape: Architecture, kind: str, path: Path) -> None:
    """Write a model of LFM2's shape with random values, always the same, and a tiny vocabulary
    beside tokens without a text."""
    chance = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "lfm2")
    writer.add_block_count(len(shape.layers))
    writer.add_context_length(32_768)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv([shape.kv_heads if one.mixer == "gqa" else 0 for one in shape.layers])
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_rope_freq_base(shape.ropes["full"].theta)
    writer.add_vocab_size(shape.vocab)
    writer.add_shortconv_l_cache(shape.conv_width)
    tokens = [*TOKENS, *(f"<|unused_{i}|>" for i in range(shape.vocab - len(TOKENS)))]
    plain = set(TOKENS) - set(SPECIALS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("lfm2")
    writer.add_token_list(tokens)
    writer.add_token_types([1 if token in plain else 3 for token in tokens])
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(SPECIALS.index("<|im_end|>"))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LFM2, len(shape.layers))
    for name, sizes in expected_shapes(shape).items():
        stem = name.removesuffix(".weight").replace("model.norm", "model.embedding_norm")
        full = f"{names.get_name(stem)}.weight"
        if name.endswith("_proj.weight") or "embed_tokens" in name:
            one = HEAD_TYPES[kind] if "embed_tokens" in name else kind.upper()
            rows, columns = sizes
            raw = gguf.GGMLQuantizationType[one]
            writer.add_tensor(full, blocks_of(one, rows, columns, chance), raw_dtype=raw)
        else:
            scale, middle = (0.3, 0) if name.endswith("conv.weight") else (0.1, 1)
            values = chance.standard_normal(sizes, np.float32) * scale + middle
            writer.add_tensor(full, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


Took = tuple[float, float]
"""Seconds by the wall, and of processor time."""


class Ours:
    """A file as the engine loads it."""

    def __init__(self, path: Path, folder: Path, threads: int, weights: WeightsKind) -> None:
        torch.set_num_threads(1)
        card = prepare(f"{path.stem}-{weights}", path, folder)
        kernels = load_kernels(card.config, threads)
        assert kernels is not None, "no C compiler works"
        config = EngineConfig(weights=weights)
        blocks = SEQUENCES * SIZE // BLOCK
        self._runner = CpuRunner(card, config, blocks=blocks, context=SIZE, kernels=kernels)
        self.vocab = card.config.vocab
        self._lengths: dict[str, int] = {}
        self._names: list[str] = []

    def prompt(self, name: str, tokens: list[int]) -> Took:
        """Compute a sequence anew, in steps of at most 512 tokens."""
        if name not in self._names:
            self._names.append(name)
        number = self._names.index(name)
        begun = (BegunSequence(number, Sampling(temperature=0), tokens, len(tokens)),)

        def run() -> None:
            for first in range(0, len(tokens), 512):
                part = tokens[first : first + 512]
                ends = first + len(part) == len(tokens)
                row = self._row(number, first, part, ends)
                self._step(StepPlan(0, (row,), begun=() if first else begun))

        ended = (number,) if name in self._lengths else ()
        self._step(StepPlan(0, (), ended=ended))
        self._lengths[name] = len(tokens)
        return timed(run)

    def decode(self, name: str, count: int) -> Took:
        """Decode so many tokens, each the likeliest."""
        number = self._names.index(name)

        def run() -> None:
            for _ in range(count):
                self._step(StepPlan(0, (self._row(number, self._lengths[name], None, True),)))
                self._lengths[name] += 1

        return timed(run)

    def logits(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        """Return the logits behind a text."""
        found: list[torch.Tensor] = []
        compute = self._runner.model.logits

        def kept(hidden: Any) -> torch.Tensor:
            found.append(compute(hidden))
            return found[-1]

        self._runner.model.logits = kept  # type: ignore[method-assign]
        self.prompt("logits", tokens)
        self._runner.model.logits = compute  # type: ignore[method-assign]
        return found[-1][-1].numpy()

    def _row(self, number: int, start: int, tokens: list[int] | None, draws: bool) -> Row:
        table = list(range(number * SIZE // BLOCK, (number + 1) * SIZE // BLOCK))
        samples = (number,) if draws else ()
        return Row(number, start, len(tokens or [0]), table, 0, tokens, samples)

    def _step(self, plan: StepPlan) -> None:
        self._runner.launch(plan)
        self._runner.collect()


class Peer:
    """llama.cpp in a process of its own."""

    def __init__(self, python: str, path: Path, threads: int) -> None:
        worker = str(Path(__file__).with_name("llama_cpp_worker.py"))
        self._process = subprocess.Popen(
            [python, worker, str(path), str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def prompt(self, name: str, tokens: list[int], **more: str) -> Took:
        return self._ask(name=name, size=SIZE, prompt=tokens, **more)

    def decode(self, name: str, count: int) -> Took:
        return self._ask(name=name, size=SIZE, decode=count)

    def logits(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        with tempfile.NamedTemporaryFile() as file:
            self.prompt("logits", tokens, logits=file.name)
            return np.fromfile(file.name, np.float32)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _ask(self, **command: Any) -> Took:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "llama.cpp ended; see its message above"
        wall_s, cpu_s = json.loads(answer)["took"]
        return wall_s, cpu_s


def timed(run: Callable[[], None]) -> Took:
    """Return what a call takes."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - began_s, time.process_time() - began_cpu_s


def measure(
    contenders: dict[str, Ours | Peer], vocab: int, rounds: int, contexts: tuple[int, ...]
) -> dict[tuple[str, str], list[Took]]:
    """Return what each takes for a token, by what and who."""
    chance = np.random.default_rng(1)
    texts = {f"on {n:,}": chance.integers(len(TOKENS), vocab, n).tolist() for n in contexts}
    for name, tokens in texts.items():
        for one in contenders.values():
            one.prompt(name, tokens)
            one.decode(name, 2)
    found: dict[tuple[str, str], list[Took]] = {}
    for _ in range(rounds):
        for name in texts:
            for who, one in contenders.items():
                wall_s, cpu_s = one.decode(name, DECODED)
                took = (wall_s / DECODED, cpu_s / DECODED)
                found.setdefault((f"decoding {name}", who), []).append(took)
        prompt = chance.integers(len(TOKENS), vocab, PROMPT).tolist()
        for who, one in contenders.items():
            wall_s, cpu_s = one.prompt("prompt", prompt)
            took = (wall_s / PROMPT, cpu_s / PROMPT)
            found.setdefault((f"prompt of {PROMPT}", who), []).append(took)
    return found


def report(found: dict[tuple[str, str], list[Took]]) -> None:
    """Print a line for each."""
    for (what, who), took in found.items():
        wall, cpu = ([1e3 * one[i] for one in took] for i in (0, 1))
        rate = statistics.median(1e3 / one for one in wall)
        print_line(
            f"{what:16} {who:10} {rate:8.1f} tok/s, ms a token: wall"
            f" {middle_and_spread(wall, '.2f')}, processor {middle_and_spread(cpu, '.2f')}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", help="a Python that imports llama_cpp; without: ours alone")
    parser.add_argument("--shape", choices=("lfm2-350m", "lfm2-1.2b"), default="lfm2-1.2b")
    parser.add_argument("--type", choices=HEAD_TYPES, default="q4_0")
    parser.add_argument("--file", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--contexts", default=",".join(map(str, CONTEXTS)), help="with commas, two at most"
    )
    parser.add_argument("--unpacked", action="store_true", help="also ours with weights in bf16")
    parser.add_argument("--folder", type=Path, default=Path("data"))
    options = parser.parse_args()
    path = options.file or options.folder / f"{options.shape}-{options.type}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_gguf(SHAPES[options.shape], options.type, path)
    ours = Ours(path, options.folder, options.threads, "auto")
    contenders: dict[str, Ours | Peer] = {"ours": ours}
    if options.unpacked:
        contenders["ours, bf16"] = Ours(path, options.folder, options.threads, "bf16")
    if options.peer:
        contenders["llama.cpp"] = Peer(options.peer, path, options.threads)
    text = np.random.default_rng(2).integers(len(TOKENS), ours.vocab, 40).tolist()
    logits = {who: one.logits(text) for who, one in contenders.items()}
    print_line(f"{path.name}, {path.stat().st_size / 1e6:.0f} MB, {options.threads} threads")
    for who in list(logits)[1:]:
        alike = np.corrcoef(logits["ours"], logits[who])[0, 1]
        print_line(f"correlation of logits, ours and {who}: {alike:.5f}")
    contexts = tuple(map(int, options.contexts.split(",")))
    report(measure(contenders, ours.vocab, options.rounds, contexts))
    for one in contenders.values():
        if isinstance(one, Peer):
            one.close()


if __name__ == "__main__":
    main()
