"""One model over several GPUs against one of them:

    python -m tests.bench.gpu_lanes [--lanes 2] [--only equality,sums,steps,prompts]
    python -m tests.bench.gpu_lanes --shape llama-70b

At Llama-3.1-8B's shape with random weights in bf16. First equality: sums against the host's, tokens
of all lanes in each step, and logprobs under graphs and without them against one GPU's. Then sums
alone, steps of 1, 64 and 256 rows, and a prompt of 8,192 tokens, in one step and as the scheduler
cuts it, on one GPU and on all. At the shape of 70B parameters, which one GPU does not hold: steps
and prompts on all. Each result is a line of its own, and nothing begins after `--seconds`.
`--device cpu`, with TRITON_INTERPRET=1, runs a tiny model to try the program.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from engine.api import CacheGrant, Finished, PromptLogprobs, Request, SampledToken, Sampling, Tokens
from engine.cache import PrefixCache
from engine.config import EngineConfig
from engine.core.core import Core
from engine.kv.format import kv_format
from engine.lanes.crew import Crew
from engine.lanes.exchange import ExchangeSize, exchanges
from engine.lanes.sharding import sharing
from engine.model_store import Architecture
from engine.model_store.tensors import lane_architecture
from engine.plan import StepPlan, StepResult
from engine.runner import gpu_runner
from engine.runner.cuda_graphs import CudaGraphs
from engine.runner.gpu_build import assemble
from engine.runner.gpu_runner import GpuRunner
from engine.server.gc_tuning import FrozenHeap
from engine.server.server import SWITCH_INTERVAL_S
from engine.weights import Tensors, random_weights
from kernels.reference_weights import as_dense
from tests.bench.gpu_workloads import CoreBench, Workload
from tests.bench.models import BLOCK, LLAMA_8B, LLAMA_70B, QWEN35_35B_A3B, with_layers
from tests.bench.results import Results, print_line

TINY = replace(
    LLAMA_8B, layers=LLAMA_8B.layers[:1], hidden=64, intermediate=64, heads=4, kv_heads=2,
    head_dim=16, vocab=64, context=64, ropes={"full": replace(LLAMA_8B.ropes["full"], dim=16)},
)  # fmt: skip
SHAPES = {"llama-8b": LLAMA_8B, "llama-70b": LLAMA_70B, "qwen3.5-35b": QWEN35_35B_A3B}
ONE_STEP_MS = 1e6
"""A target for gaps with which no prompt is cut."""
PARTS = "equality,sums,steps,prompts"
MEAN_ERROR_MAX = 0.08
"""Of logprobs in bf16 against one GPU's; as between a GPU and a CPU."""
SUMS = 64


class WaitingRunner:
    """`engine.plan.Runner` that measures how long the host waits in `collect`."""

    def __init__(self, runner: GpuRunner) -> None:
        self.runner = runner
        self.waited_s = 0.0

    def launch(self, plan: StepPlan) -> None:
        """See `Runner`."""
        self.runner.launch(plan)

    def collect(self) -> StepResult:
        """See `Runner`."""
        started = time.perf_counter()
        result = self.runner.collect()
        self.waited_s = time.perf_counter() - started
        return result


class LanesBench(CoreBench):
    """A core over a model on some GPUs."""

    def __init__(
        self, config: Architecture, shares: list[Tensors], devices: list[torch.device],
        blocks: int, step_tokens: int, sequences: int,
    ) -> None:  # fmt: skip
        dtype = next(iter(shares[0].values())).dtype
        form = kv_format(config, dtype, BLOCK, has_groups=True, lanes=len(devices))
        runner, _ = assemble(
            config, shares, form, blocks, devices, context=config.context, seats=sequences + 32,
            tokens_max=step_tokens + sequences + 32, dtype=dtype,
        )  # fmt: skip
        self.runner = WaitingRunner(runner)
        settings = EngineConfig(
            step_tokens_max=step_tokens, prefill_chunk_tokens_max=step_tokens,
            sequences_max=sequences, queue_tokens_max=10_000_000,
        )  # fmt: skip
        self.core = Core(
            PrefixCache(blocks=blocks, block_size=BLOCK, state_blocks=runner.state_blocks),
            self.runner, settings, time.perf_counter, vocab_size=config.vocab,
            context_tokens=config.context, pipeline_depth=2, run_up=config.run_up,
        )  # fmt: skip

    def aim_at(self, gap_target_ms: float) -> None:
        """Cut prompts for this target of gaps between steps."""
        scheduler = self.core.scheduler
        scheduler.config = replace(scheduler.config, gap_target_ms=gap_target_ms)

    def waited_s(self) -> float:
        """See `CoreBench.waited_s`."""
        return self.runner.waited_s

    def answers(
        self, *requests: Request
    ) -> tuple[dict[str, list[SampledToken]], dict[str, list[SampledToken | None]]]:
        """Return the output tokens and the prompt logprobs of each request."""
        drawn: dict[str, list[SampledToken]] = {}
        known: dict[str, list[SampledToken | None]] = {}
        for request in requests:
            self.core.submit(request)
        while self.core.has_work():
            for event in self.core.step():
                if isinstance(event, Tokens):
                    drawn.setdefault(event.request_id, []).extend(event.tokens)
                if isinstance(event, PromptLogprobs):
                    known.setdefault(event.request_id, []).extend(event.tokens)
                if isinstance(event, Finished):
                    assert event.ending == "done", event
        return drawn, known


def check_equality(
    one: LanesBench, several: LanesBench, vocab: int, lengths: Sequence[int], output: int
) -> dict[str, Any]:
    """Compare logprobs of prompts (steps without graphs) and of outputs (under graphs) with those
    that one GPU gives the same tokens. `lengths`: of the prompts, each of which begins as the one
    before. Raises AssertionError."""
    rng = random.Random(3)
    whole = tuple(rng.randrange(vocab) for _ in range(max(lengths)))
    texts = [whole[:length] for length in lengths]
    sampling = Sampling(temperature=0, logprobs=0)
    asked = [
        Request(str(i), text, output, CacheGrant(b"e"), sampling) for i, text in enumerate(texts)
    ]
    drawn, _ = several.answers(*asked)
    errors: dict[str, list[float]] = {"graphs": [], "no graphs": []}
    for i, text in enumerate(texts):
        whole = text + tuple(token.token_id for token in drawn[str(i)])
        grant = CacheGrant(b"p", read=False)
        scored = Request("s", whole, 0, grant, Sampling(temperature=0), prompt_logprobs=0)
        (_, mine), (_, theirs) = several.answers(scored), one.answers(scored)
        expected = [0.0 if token is None else token.logprob or 0.0 for token in theirs["s"]]
        found = [0.0 if token is None else token.logprob or 0.0 for token in mine["s"]]
        pairs = zip(found, expected, strict=True)
        errors["no graphs"] += [abs(a - b) for a, b in pairs]
        outputs = [token.logprob or 0.0 for token in drawn[str(i)]]
        pairs = zip(outputs, expected[len(text) :], strict=True)
        errors["graphs"] += [abs(a - b) for a, b in pairs]
    line: dict[str, Any] = {"measure": "equality", "tokens of lanes": "equal in each step"}
    for name, values in errors.items():
        line |= {f"{name}: mean error": round(statistics.mean(values), 5),
                 f"{name}: worst": round(max(values), 5)}  # fmt: skip
        assert statistics.mean(values) < MEAN_ERROR_MAX, line
    return line


def timed_event() -> Any:
    """Return an event that knows when it was reached."""
    event: Any = torch.cuda.Event
    return event(enable_timing=True)


def time_sums(devices: list[torch.device], channels: int) -> dict[str, Any]:
    """Return the microseconds of a sum with residual and norm, in a graph, by rows."""
    crew = Crew(devices)
    size = ExchangeSize(256, channels, 1, 8)
    found = exchanges(crew, size, torch.bfloat16)
    line: dict[str, Any] = {"measure": "a sum with residual and norm, us"}
    for rows in (1, 8, 64, 256):
        graphs = [CudaGraphs() for _ in devices]
        kept = []
        for device in devices:
            x = torch.zeros(rows, channels, dtype=torch.bfloat16, device=device)
            kept.append((x, torch.zeros_like(x), torch.ones_like(x[0])))

        def work(lane: int, kept: Any = kept, rows: int = rows) -> torch.Tensor:
            total: torch.Tensor = kept[lane][0]
            out: torch.Tensor = kept[lane][1]
            weight = kept[lane][2]
            found[lane].begin()
            for _ in range(SUMS):
                part = found[lane].part(rows)
                found[lane].sum(part, total, add=True, weight=weight, out=out, eps=1e-5)
            return out

        def warm(lane: int, graphs: Any = graphs, work: Any = work) -> None:
            graphs[lane].warm(partial(work, lane))

        crew.run(warm)
        for lane, graph in enumerate(graphs):
            with crew.on(lane):
                torch.cuda.synchronize()
                graph.capture(rows, partial(work, lane))
        times = []
        for _ in range(6):
            begin, end = timed_event(), timed_event()
            begin.record()
            for lane, graph in enumerate(graphs):
                with crew.on(lane):
                    graph.replay(rows)
            end.record()
            for device in devices:
                torch.cuda.synchronize(device)
            times.append(begin.elapsed_time(end) / SUMS * 1e3)
        line[str(rows)] = round(statistics.median(times[1:]), 2)
    assert not any(one.has_failed for one in found), "a lane waited in vain"
    crew.close()
    return line


class Program:
    """The measurements in order, each within the time."""

    def __init__(self, seconds: float, results: Results) -> None:
        self._started = time.perf_counter()
        self._seconds = seconds
        self._results = results

    def measure(self, name: str, work: Callable[[], dict[str, Any] | None]) -> bool:
        """Run a measurement; return whether it was made. What it raises is printed."""
        at = time.perf_counter() - self._started
        if at > self._seconds:
            print_line(f"{name}: no time left after {at:.0f} s")
            return False
        try:
            line = work()
        except Exception:
            print_line(f"{name}: failed after {at:.0f} s\n{traceback.format_exc(limit=-6)}")
            return False
        took = time.perf_counter() - self._started - at
        if line is not None:
            self._results.add({**line, "took_s": round(took, 1)})
        else:
            print_line(f"{name}: {took:.1f} s")
        return True


def main() -> None:
    """Print a line for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--only", default=PARTS)
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--seconds", type=float, default=215.0)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    is_tiny, lanes, parts = options.device == "cpu", options.lanes, options.only.split(",")
    config = TINY if is_tiny else SHAPES[options.shape]
    if options.layers:
        config = with_layers(config, options.layers)
    devices = [torch.device("cpu") if is_tiny else torch.device("cuda", i) for i in range(lanes)]
    if not is_tiny:
        name = torch.cuda.get_device_name()
        print_line(f"{torch.cuda.device_count()} x {name}, torch {torch.__version__}")
    gpu_runner.COMPARED_STEPS = 1
    results = Results()
    program = Program(options.seconds, results)
    benches: dict[str, LanesBench] = {}
    is_large = config.layers == LLAMA_70B.layers
    build = build_lanes if is_large else build_both
    if not program.measure("build", lambda: build(benches, config, devices)):
        return
    if "equality" in parts and not is_large:
        lengths, drawn = ((9,), 2) if is_tiny else ((300, 305, 340), 8)
        both = benches["one"], benches["lanes"]
        if not program.measure(
            "equality", lambda: check_equality(*both, config.vocab, lengths, drawn)
        ):
            return
    gpu_runner.COMPARED_STEPS = 64
    if "sums" in parts and not is_tiny:
        program.measure("sums", lambda: time_sums(devices, config.hidden))
    shapes = {
        "1": Workload("1", 1, ((1, 512),)),
        "64": Workload("64", 64, ((64, 448),)),
        "256": Workload("256", 256, ((1, 2048), (256, 64))),
    }
    if is_tiny:
        shapes = {"1": Workload("1", 1, ((1, 9),))}
    if is_large:
        del shapes["256"]
    for name, work in shapes.items() if "steps" in parts else ():
        output = 2 if is_tiny else 64
        program.measure(f"{name} rows", partial(compare_steps, benches, work, output, config))
    longest = 12 if is_tiny else 8192
    for cut, gap_ms in {"in one step": ONE_STEP_MS, "as it is cut": 50.0}.items():
        if "prompts" in parts:
            program.measure(
                f"prompt {cut}", partial(compare_prompts, benches, longest, config, cut, gap_ms)
            )
    results.write(options.json)


def build_both(
    benches: dict[str, LanesBench], config: Architecture, devices: list[torch.device]
) -> dict[str, Any]:
    """Make a core over the first device and one over all, of the same weights, with all graphs;
    return what the graphs take of each device."""
    is_tiny, lanes = devices[0].type == "cpu", len(devices)
    kind = torch.float32 if is_tiny else torch.bfloat16
    blocks, step, sequences = (12, 16, 1) if is_tiny else (4_000, 8192, 256)
    weights = random_weights(config, kind, 0, devices[0])
    share = sharing(config, lanes)
    shares: list[Tensors] = [
        {
            name: as_dense(share(name, one, lane), kind).to(devices[lane])
            for name, one in weights.items()
        }
        for lane in range(lanes)
    ]
    benches["one"] = LanesBench(config, [weights], devices[:1], blocks, step, sequences)
    benches["lanes"] = LanesBench(config, shares, devices, blocks, step, sequences)
    found: dict[str, Any] = {"measure": "graphs"}
    found |= {name: capture(bench, devices, sequences) for name, bench in benches.items()}
    settle()
    return found


def build_lanes(
    benches: dict[str, LanesBench], config: Architecture, devices: list[torch.device]
) -> dict[str, Any]:
    """Make a core over all devices, each with random weights of its own."""
    own = lane_architecture(config, len(devices))
    shares = [
        random_weights(own, torch.bfloat16, lane, device) for lane, device in enumerate(devices)
    ]
    benches["lanes"] = LanesBench(config, shares, devices, 3_000, 8192, 64)
    found = {"measure": "graphs", "lanes": capture(benches["lanes"], devices, 64)}
    settle()
    return found


def settle() -> None:
    """Do what the engine's process does before it serves."""
    FrozenHeap().settle()
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def capture(bench: LanesBench, devices: list[torch.device], sequences: int) -> dict[str, Any]:
    """Capture all graphs; return how many, the seconds, and the MiB that each device then lacks."""
    is_cuda = devices[0].type == "cuda"
    began_s = time.perf_counter()
    free = [torch.cuda.mem_get_info(one)[0] for one in devices if is_cuda]
    bench.runner.runner.capture_all(sequences)
    left = [torch.cuda.mem_get_info(one)[0] for one in devices if is_cuda]
    return {
        "graphs": bench.runner.runner.graph_count,
        "seconds": round(time.perf_counter() - began_s, 1),
        "mib": [(before - after) // 2**20 for before, after in zip(free, left, strict=True)],
    }


def compare_steps(
    benches: dict[str, LanesBench], work: Workload, output: int, config: Architecture
) -> dict[str, Any]:
    """Return the steps of a workload on one GPU and on all: the second run, whose prompts are
    cached and whose graphs are captured."""
    prompts = [tuple(t % config.vocab for t in prompt) for prompt in work.prompts(1)]
    line: dict[str, Any] = {"measure": f"step of {work.name} rows, ms"}
    for name, bench in benches.items():
        bench.run(prompts, work.name.encode(), output)
        found = bench.run(prompts, work.name.encode(), output)
        line |= {name: found["step_ms"], f"{name}: host": found["host_ms"],
                 f"{name}: p95": found["step_ms_p95"]}  # fmt: skip
    return with_ratio(line)


def compare_prompts(
    benches: dict[str, LanesBench], tokens: int, config: Architecture, cut: str, gap_ms: float
) -> dict[str, Any]:
    """Return the time to the first token of an uncached prompt on one GPU and on all."""
    rng = random.Random(5)
    prompt = tuple(rng.randrange(config.vocab) for _ in range(tokens))
    line: dict[str, Any] = {"measure": f"first token of a prompt of {tokens} {cut}, ms"}
    for name, bench in benches.items():
        bench.aim_at(gap_ms)
        found = [
            bench.run([prompt], b"%s %d" % (cut.encode(), i), 1)["first_token_ms"] for i in range(5)
        ]
        line |= {name: statistics.median(found[2:]), f"{name}: all": found}
    return with_ratio(line)


def with_ratio(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line with all GPUs' time over one's, where it has both."""
    if "one" in line:
        line["ratio"] = round(line["lanes"] / max(line["one"], 1e-9), 3)
    return line


if __name__ == "__main__":
    with torch.inference_mode():
        main()
