"""Steps with prompts beside decoding rows on a GPU, at Llama-3.1-8B's shape.

    python -m tests.bench.gpu_mixed [--only check,start,steps,...] [--seconds 12]

Sections: `check` compares graphs with launches operation by operation; `start` captures all graphs;
`steps` times mixed steps; `host` and `kernels` profile some; `buckets` times one prompt of every
bucket; `traffic` and `cold` send the arrivals of `tests.bench.open_loop` through the core, in
process. A section that fails prints its traceback, and the next one runs.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import random
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from engine.api import CacheGrant, DraftCount, Finished, Request, Sampling, Tokens
from engine.core.step_drafts import EXPOSED_S
from engine.drafts.drafter import Drafter
from engine.kv.format import kv_format
from engine.kv.storage import KvStorage
from engine.model_store import Architecture
from engine.models.decoder import DecoderModel
from engine.models.gpu_layers import GpuOps
from engine.plan import BegunSequence, Group, Row, StepPlan, StepResult
from engine.runner.gpu_build import DRAFTED_TOKENS_MAX
from engine.runner.gpu_runner import MIXED_BUCKETS, GpuRunner
from engine.runner.warmup import WarmupLimits
from engine.weights import random_weights
from tests.bench import open_loop
from tests.bench.device import release_memory
from tests.bench.gpu_workloads import Bench
from tests.bench.models import BLOCK, LLAMA_8B, random_kv, with_layers
from tests.bench.open_loop import Arrival, Seen
from tests.bench.results import print_line

SHARED, OWN = 2048, 96
"""Tokens of each tenant's prefix, and a decoding row's own."""

GREEDY = Sampling(temperature=0)

CASES = {
    "8 + 64": (8, (64,), 0),
    "32 + 64": (32, (64,), 0),
    "64 + 64": (64, (64,), 0),
    "96 + 64": (96, (64,), 0),
    "200 + 64": (200, (64,), 0),
    "32 + 4x64": (32, (64,) * 4, 0),
    "96 + 8x64": (96, (64,) * 8, 0),
    "200 + 16x64": (200, (64,) * 16, 0),
    "64 + 384": (64, (384,), 0),
    "64 + 384 after 6,144": (64, (384,), 6144),
    "64 + 1,920 after 4,096": (64, (1920,), 4096),
    "0 + 64": (0, (64,), 0),
    "0 + 512": (0, (512,), 0),
    "0 + 64 after 6,144": (0, (64,), 6144),
}
"""Decoding rows, the tokens of each prompt, and a prompt's own tokens before these; each row and
prompt follows one of eight tenants' prefixes."""


@dataclass(frozen=True)
class Batch:
    """A step of `decoding` rows and `prompts`, dealt to `tenants` prefixes.

    `before`: a prompt's own tokens that are cached. `first_id`: the first sequence id. Blocks are
    taken from 1 on.
    """

    decoding: int
    prompts: Sequence[int]
    before: int = 0
    tenants: int = 8
    sampling: Sampling = GREEDY
    first_id: int = 0

    def plan(self) -> StepPlan:
        """Return the step, which begins its sequences."""
        rng = random.Random(7)
        rows: list[Row] = []
        groups: list[Group] = []
        begun: list[BegunSequence] = []
        shared, free = SHARED // BLOCK, 1
        for tenant in range(self.tenants):
            prefix = list(range(free, free + shared))
            free += shared
            first = len(rows)
            lengths = [0] * len(range(tenant, self.decoding, self.tenants))
            for length in [*lengths, *self.prompts[tenant :: self.tenants]]:
                start = SHARED + (self.before if length else OWN - rng.randrange(64))
                count = length or 1
                own = -(-(start + count) // BLOCK) + 1 - shared
                table = prefix + list(range(free, free + own))
                free += own
                tokens = [rng.randrange(LLAMA_8B.vocab) for _ in range(count)]
                name = self.first_id + len(rows)
                rows.append(Row(name, start, count, table, 0, tokens, (name,)))
                begun.append(
                    BegunSequence(name, self.sampling, [0] * (start + count), start + count)
                )
            if len(rows) > first + 1:
                groups.append(Group(first, len(rows), 0, shared))
        return StepPlan(0, tuple(rows), tuple(groups), tuple(begun))


def next_decode(plan: StepPlan) -> StepPlan:
    """Return the step after a plan's, in which every row decodes the token it has sampled."""
    rows = tuple(
        msgspec.structs.replace(row, start=row.start + row.count, count=1, token_ids=None)
        for row in plan.rows
    )
    return msgspec.structs.replace(plan, rows=rows, begun=())


class Steps:
    """Runs batches on a runner, one after the other, each with sequences of its own."""

    def __init__(self, runner: GpuRunner) -> None:
        self.runner = runner
        self.ended: tuple[int, ...] = ()
        self.first_id = 1_000_000

    def begin(self, batch: Batch) -> StepPlan:
        """Run a batch once; return the same step for running it again."""
        batch = replace(batch, first_id=self.first_id)
        plan = msgspec.structs.replace(batch.plan(), ended=self.ended)
        self.ended = tuple(row.sequence_id for row in plan.rows)
        self.first_id += len(plan.rows)
        self.run(plan)
        return msgspec.structs.replace(plan, begun=(), ended=())

    def run(self, plan: StepPlan) -> StepResult:
        self.runner.launch(plan)
        return self.runner.collect()

    def end(self) -> None:
        """End the last batch's sequences."""
        self.run(StepPlan(0, (), ended=self.ended))
        self.ended = ()

    def measure(self, batch: Batch, repeats: int = 10) -> dict[str, float]:
        """Return the host's time of a launch, the time of a step alone, and per step of a pipeline
        of depth 2, all in ms."""
        plan = self.begin(batch)
        for _ in range(2):
            self.run(plan)
        launches, walls = [], []
        for _ in range(repeats):
            torch.cuda.synchronize()
            started = time.perf_counter()
            self.runner.launch(plan)
            launches.append(time.perf_counter() - started)
            self.runner.collect()
            walls.append(time.perf_counter() - started)
        self.runner.launch(plan)
        started = time.perf_counter()
        for _ in range(repeats):
            self.runner.launch(plan)
            self.runner.collect()
        steady = (time.perf_counter() - started) / repeats
        self.runner.collect()
        return {
            "launch": statistics.median(launches) * 1e3,
            "alone": statistics.median(walls) * 1e3,
            "steady": steady * 1e3,
        }


# -- sections ---------------------------------------------------------------------------------


def check() -> None:
    """Print how graphs differ from launches operation by operation, on two layers."""
    config = with_layers(LLAMA_8B, 2)
    device = torch.device("cuda")
    model = DecoderModel(config, random_weights(config, torch.bfloat16, 0, device), GpuOps())
    form = kv_format(config, torch.bfloat16, BLOCK)
    first = random_kv(form, 4000, device)
    steps = []
    for graphs in (False, True):
        kv = KvStorage(form, 4000, device)
        steps.append(
            Steps(GpuRunner(model, kv, context=config.context, seats=288, tokens_max=8480,
                            graphs=graphs))
        )  # fmt: skip
    print_line("check: equal tokens, logprobs' error, KV's error, other blocks changed")
    shapes: list[tuple[int, tuple[int, ...], int]] = [
        (8, (64,), 0), (30, (5, 200, 1), 0), (100, (64,) * 5, 0), (0, (33,), 0), (2, (1500,), 0),
        (4, (64, 2, 200), 2643), (60, (300,), 1000),
    ]  # fmt: skip
    for decoding, prompts, before in shapes:
        for sampling in (Sampling(temperature=0), Sampling(temperature=0, logprobs=1)):
            results = []
            for one in steps:
                one.runner.kv.data.copy_(first.data)
                again = one.begin(Batch(decoding, prompts, before, sampling=sampling))
                results.append((one.run(again), one.run(next_decode(again))))
            name = f"{decoding} + {prompts} after {before}, logprobs {sampling.logprobs}"
            print_line(f"  {name}: "
                       + compared(results, [one.runner for one in steps], first))  # fmt: skip


def compared(
    results: Sequence[tuple[StepResult, StepResult]], runners: list[GpuRunner], first: KvStorage
) -> str:
    """Return a line that compares two runs of two steps each, and the KV that they have left."""
    out = []
    for eager, graph in zip(*results, strict=True):
        sampled = zip(eager.sampled.values(), graph.sampled.values(), strict=True)
        pairs = [(a, b) for (a,), (b,) in sampled]
        equal = sum(a.token_id == b.token_id for a, b in pairs)
        errors = [
            abs(a.logprob - b.logprob)
            for a, b in pairs
            if a.logprob is not None and b.logprob is not None
        ]
        out.append(f"{equal}/{len(pairs)} {max(errors, default=0):.4f}")
    a, b = (runner.kv.data for runner in runners)
    changed = (a != first.data).flatten(1).any(1)
    error = float((a[changed].float() - b[changed].float()).norm() / a[changed].float().norm())
    others = int((b[~changed] != first.data[~changed]).sum())
    return f"{out[0]}, then {out[1]}; KV {error:.1e}; others {others}"


class MixedBench:
    """The sections that need the whole model."""

    def __init__(self, config: Architecture, blocks: int, seconds: float) -> None:
        self.bench = Bench(config, blocks)
        self.runner = self.bench.runner
        self.seconds = seconds
        self.limits = WarmupLimits(
            block_size=BLOCK, blocks=blocks, context=config.context, sequences=256,
            step_tokens=8192, vocab=config.vocab,
        )  # fmt: skip

    def start(self) -> None:
        """Warm up with an empty kernel cache, on a runner that is then dropped, and again."""
        model, kv = self.runner.model, self.runner.kv
        cold = GpuRunner(
            model, kv, context=self.bench.config.context, seats=288, tokens_max=8192 + 288
        )
        for name, runner in (("kernels compiled", cold), ("kernels cached", self.runner)):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info()[0]
            started = time.perf_counter()
            shapes = runner.graph_shapes(256)
            with torch.inference_mode():
                runner.capture_all(256)
                torch.cuda.synchronize()
                captured = time.perf_counter() - started
                torch.cuda.empty_cache()
                used = (free - torch.cuda.mem_get_info()[0]) / 2**20
                runner.warm_up(self.limits)
            print_line(
                f"start, {name}: {runner.graph_count} graphs of {len(shapes)} in {captured:.1f} s,"
                f" {used:.0f} MiB; with warm-up {time.perf_counter() - started:.1f} s"
            )
            del runner
        del cold
        release_memory()

    def drafts(self) -> None:
        """Draft from here on, as an engine does that has measured its steps."""
        started = time.perf_counter()
        with torch.inference_mode():
            times = self.runner.time_steps(DRAFTED_TOKENS_MAX)
        self.bench.core.drafts.drafter = Drafter(times, exposed_s=EXPOSED_S)
        print_line(f"drafts: steps timed in {time.perf_counter() - started:.2f} s")

    def steps(self) -> None:
        """Time every case with graphs and operation by operation."""
        print_line("steps, ms: launch / alone / steady by graph; the same operation by operation")
        steps = Steps(self.runner)
        for name, (decoding, prompts, before) in CASES.items():
            line = f"  {name:24}"
            for graphs in (True, False):
                self.runner.graphs_on = graphs
                got = steps.measure(Batch(decoding, prompts, before))
                line += "  | " + " ".join(f"{got[k]:6.2f}" for k in ("launch", "alone", "steady"))
            self.runner.graphs_on = True
            print_line(line)
        for decoding in (8, 32, 64, 96, 200, 256):
            got = steps.measure(Batch(decoding, ()))
            print_line(f"  {decoding} decoding: " + " ".join(f"{v:6.2f}" for v in got.values()))
        steps.end()

    def host(self) -> None:
        """Profile the host's work of launches."""
        steps = Steps(self.runner)
        for decoding, prompts in ((96, (64,)), (256, ())):
            plan = steps.begin(Batch(decoding, prompts))
            profiler = cProfile.Profile()
            for _ in range(20):
                torch.cuda.synchronize()
                profiler.enable()
                self.runner.launch(plan)
                profiler.disable()
                self.runner.collect()
            text = io.StringIO()
            pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(14)
            lines = [line[:110] for line in text.getvalue().splitlines() if line.strip()]
            print_line(f"host, 20 launches of {decoding} + {prompts}\n" + "\n".join(lines[2:]))
        steps.end()

    def kernels(self) -> None:
        """Print where the GPU's time of a step goes."""
        steps = Steps(self.runner)
        for name, graphs in (
            *(("32 + 64", True), ("64 + 384", True), ("64 + 384", False)),
            *(("200 + 16x64", True), ("200 + 16x64", False)),
        ):
            self.runner.graphs_on = graphs
            plan = steps.begin(Batch(*CASES[name]))
            for _ in range(20):
                steps.run(plan)  # so that the clock is as in long runs
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                for _ in range(3):
                    steps.run(plan)
                torch.cuda.synchronize()
            events = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
            total = sum(event.self_device_time_total for event in events) / 3
            way = "graph" if graphs else "eager"
            print_line(f"kernels of {name}, {way}: {total:.0f} us a step; us: launches")
            for event in events[:12]:
                line = f"  {event.self_device_time_total / 3:8.0f}: {event.count // 3:4} "
                print_line(line + event.key[:90])
        self.runner.graphs_on = True
        steps.end()

    def buckets(self) -> None:
        """Time a step of one prompt that fills each bucket, by graph and operation by operation:
        the matrix products by number of rows, with next to no attention."""
        print_line("buckets, one prompt of as many tokens, steady ms: graph, eager")
        steps = Steps(self.runner)
        for rows in (*MIXED_BUCKETS[3:], 272, 288, 416):
            line = f"  {rows:5}"
            for graphs in (True, False):
                self.runner.graphs_on = graphs
                line += f"  {steps.measure(Batch(0, (rows,)), 12)['steady']:6.2f}"
            print_line(line)
        self.runner.graphs_on = True
        steps.end()

    def traffic(self) -> None:
        """Poisson arrivals over eight warm prefixes: 64 own tokens, 128 out."""
        for rate in (20, 50, 100, 150):
            self._run_arrivals(f"traffic, {rate}/s", *open_loop.steady("", rate, self.seconds))

    def cold(self) -> None:
        """8 cold prompts of 8,192 arrive beside streams, at intervals and together."""
        for streams, interval_s in ((64, 0.5), (64, 0.0), (0, 0.0)):
            name = f"8 cold prompts of 8,192 beside {streams}, every {interval_s} s"
            self._run_arrivals(name, *open_loop.cold_beside_decoding("", streams, interval_s))

    def _run_arrivals(self, name: str, warm: list[list[int]], arrivals: list[Arrival]) -> None:
        """Compute prefixes, submit each request when it is due, and print what was seen."""
        core, grant = self.bench.core, CacheGrant(name.encode())
        for prefix in warm:
            self.bench.run([tuple(prefix)], grant.namespace, 2)
        seen = [Seen(one.due_s, one.watched, one.timed, status=200) for one in arrivals]
        waiting = list(range(len(arrivals)))[::-1]
        drafts: list[DraftCount] = []
        started = time.perf_counter()
        while waiting or core.has_work():
            now_s = time.perf_counter() - started
            while waiting and arrivals[waiting[-1]].due_s <= now_s:
                index = waiting.pop()
                body = arrivals[index].body
                tokens = tuple(body["prompt"])
                core.submit(Request(f"{index}", tokens, body["max_tokens"], grant, GREEDY))
            if not core.has_work():
                time.sleep(min(1e-3, max(0.0, arrivals[waiting[-1]].due_s - now_s)))
                continue
            events = core.step()
            now_s = time.perf_counter() - started
            for event in events:
                if isinstance(event, Tokens):
                    one = seen[int(event.request_id)]
                    for _ in event.tokens:
                        one.add_token(now_s, one.last_s)
                if isinstance(event, Finished):
                    drafts += event.usage.drafts
        print_line(open_loop.summary(name, seen))
        if drafts:
            drafted, accepted = sum(d.drafted for d in drafts), sum(d.accepted for d in drafts)
            print_line(f"  drafts: {accepted} of {drafted} accepted")
        core.cache.erase(grant.namespace)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    sections = "check,start,steps,host,kernels,buckets,traffic,cold"
    parser.add_argument("--only", default=sections)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=18_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    began = time.perf_counter()
    print_line(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")

    def guarded(name: str, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception:
            print_line(f"{name} failed:\n{traceback.format_exc(limit=-6)}")
        print_line(f"[{name} ended at {time.perf_counter() - began:.0f} s]")

    wanted = options.only.split(",")
    if "check" in wanted:
        guarded("check", check)
        release_memory()
    rest = [name for name in wanted if name != "check"]
    if rest:
        bench = MixedBench(with_layers(LLAMA_8B, options.layers), options.blocks, options.seconds)
        for name in rest:
            guarded(name, getattr(bench, name))


if __name__ == "__main__":
    main()
