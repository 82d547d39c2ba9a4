"""The same workloads over HTTP, and requests that arrive at random.

    python -m tests.bench.gpu_http [--only W1,W2] [--json FILE]
    python -m tests.bench.gpu_http --only "" --rates 20,50,100,150 --mixture 40,80 --cold
    python -m tests.bench.gpu_http --only "" --neighbours
    python -m tests.bench.gpu_http --shape Qwen3-8B --only "" --rates 20,50,100,150
    python -m tests.bench.gpu_http --gpus 0,1 --only "" --rates 20,50,100,150
    python -m tests.bench.gpu_http --replicas 2 --processes 2 --only W2 --rates 150,300

Starts the gateway and its engine process on this machine's GPU, or with `--replicas` engines
elsewhere, one for each GPU, behind TLS, and with `--processes` several processes of the gateway,
over PostgreSQL and Valkey. Engines have random weights of a shape, Llama-3.1-8B's by default. It
sends streaming completions of token ids from several client processes, because one process reads
events no faster than the gateway writes them. Tokens are counted from the usage in the responses.
`tests.bench.open_loop` has the arrivals; each line ends in the figures of vLLM with Llama's shape.
A rate runs for `--seconds`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.config import EngineConfig, LevelsConfig
from engine.model_store import Architecture, ModelCard, load_card
from gateway.cli.database import connect, open_store
from gateway.cli.serve import serve as serve_models
from gateway.config import (
    AdminConfig,
    Config,
    LimitsConfig,
    LogConfig,
    ModelSettings,
    ServerConfig,
    TenancyConfig,
)
from gateway.config.config_file import ConfigSource
from gateway.config.fleet import FleetConfig
from gateway.processes.member import Announcement, GroupMember
from gateway.shared.gateway_id import name_start, take_gateway_id
from tenancy.accounts.keys import create_key
from tenancy.accounts.tenants import create_tenant
from tenancy.types import wall_ms
from tests.bench import gpu_fleet, open_loop
from tests.bench.gpu_workloads import OUTPUT, WORKLOADS, Workload
from tests.bench.models import GEMMA3_12B, GPT_OSS_20B, LLAMA_8B, QWEN3_8B, QWEN3_30B_A3B
from tests.bench.open_loop import Arrival, Seen
from tests.bench.overhead.processor_time import processor_s
from tests.bench.results import Results, print_line

MODULE = "tests.bench.gpu_http"
NAME, PORT, ADMIN_PORT = "random-8b", 18_480, 18_481
READY_TIMEOUT_S = 240.0
SHAPES = {
    "Llama-3.1-8B": LLAMA_8B,
    "Qwen3-8B": QWEN3_8B,
    "Gemma-3-12B": GEMMA3_12B,
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
    "gpt-oss-20b": GPT_OSS_20B,
}


def write_model(folder: Path, shape: Architecture) -> ModelCard:
    """Write a prepared folder of a shape, without weights, and return its card.

    The tokenizer has a word for every id, so that every token is an event; the card's source is a
    seed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    vocab |= {f"\u0120w{i:x}": i for i in range(len(vocab), shape.vocab)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    card = ModelCard(
        name=NAME,
        digest="random-0",
        config=shape,
        source="random:0",
        folder=str(folder),
        template_digest="none",
        stop_token_ids=(),
        special_token_ids=(),
    )
    (folder / "model_card.json").write_bytes(msgspec.json.encode(card))
    return card


def config_of(data: Path, options: argparse.Namespace) -> Config:
    """Return a config for `options.sequences` at once, of one tenant, with 40 GB of blocks."""
    number = options.engine
    return Config(
        data_dir=str(data),
        model=ModelSettings(replicas=gpu_fleet.addresses(options.replicas)),
        server=ServerConfig(listen=f"127.0.0.1:{PORT}", processes=options.processes),
        admin=AdminConfig(listen=f"127.0.0.1:{ADMIN_PORT + (options.process or 0)}"),
        tenancy=TenancyConfig(database=options.database),
        fleet=FleetConfig(shared=options.shared, prompts_apart="auto" if options.apart else "off"),
        limits=LimitsConfig(requests_per_tenant_max=8_192),
        log=LogConfig(requests=False),
        engine=EngineConfig(
            device="cuda",
            gpus=tuple(numbers(options.gpus)) if number is None else (number,),
            kv_blocks=20_000,
            step_tokens_max=8_192,
            prefill_chunk_tokens_max=8_192,
            sequences_max=options.sequences,
            queue_tokens_max=10_000_000,
            gap_target_shared_ms=options.gap_target_shared_ms,
            levels=LevelsConfig(host_mib=options.host_mib),
            role=("decode" if number else "prefill") if options.apart else "any",
        ),
    )


def write_keys(config: Config) -> tuple[str, str]:
    """Create two tenants; return a key of each."""
    store, first = open_store(config)
    with closing(store):
        other = create_tenant(store, wall_ms, "other")
        assert first is not None, "the database is new"
        return first, create_key(store, wall_ms, other.tenant_id)


def serve(config: Config, process: int | None) -> None:
    """Run the server, in its own process. `process`: the number of one of several."""
    member = None if process is None else GroupMember(process)

    def announce(urls: list[str], states: Mapping[str, str]) -> None:
        if member is None:
            print_line("ready")
        else:
            member.announce(Announcement(urls, states))

    store, card = connect(config), load_card(config.data / "model")
    start = name_start(take_gateway_id(config.data, store, process=process))
    source = ConfigSource(None, lambda: config)
    asyncio.run(serve_models(config, [card], store, announce, source, start=start, member=member))


def run_role(options: argparse.Namespace) -> None:
    """Be a client, an engine, a process of the gateway, or what keeps several of these."""
    if options.client:
        asyncio.run(send_arrivals())
        return
    config = config_of(options.serve, options)
    if options.engine is not None:
        gpu_fleet.keep(config, options.engine)
    elif options.processes > 1 and options.process is None:
        command = [sys.executable, "-m", MODULE, *sys.argv[1:]]
        gpu_fleet.keep_gateways(command, PORT, options.processes)
    else:
        serve(config, options.process)


async def send_arrivals() -> None:
    """Run a client process over stdin and stdout.

    It reads the keys of two tenants, then for each run a line of arrivals; it answers "ready",
    reads when the run starts, sends each request when it is due, and prints what it saw.
    """
    key, other_key = sys.stdin.readline().split()
    url = f"http://127.0.0.1:{PORT}"
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=READY_TIMEOUT_S)
    async with aiohttp.ClientSession(
        url, headers=headers, connector=connector, timeout=timeout
    ) as session:
        for line in iter(sys.stdin.readline, ""):
            arrivals = msgspec.json.decode(line, type=list[Arrival])
            print_line("ready")
            start_s = float(sys.stdin.readline())
            seen = await asyncio.gather(
                *(open_loop.send(session, one, start_s, other_key) for one in arrivals)
            )
            print_line(msgspec.json.encode(seen).decode())


class Clients:
    """Client processes that start a run together."""

    gateway_share = 0.0
    """Processor time of the gateway's processes over the last run's seconds."""

    def __init__(self, keys: tuple[str, str], count: int, gateway: Sequence[int]) -> None:
        """`gateway`: the ids of its processes."""
        self._gateway = gateway
        command = [sys.executable, "-m", MODULE, "--client"]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(count)
        ]
        for process in self._processes:
            self._write_line(process, " ".join(keys))

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(30)

    def run(self, arrivals: list[Arrival]) -> list[Seen]:
        """Send each request when it is due, dealt to the processes; return what they saw."""
        used = self._processes[: len(arrivals)]
        for i, process in enumerate(used):
            self._write_line(process, msgspec.json.encode(arrivals[i :: len(used)]).decode())
        for process in used:
            assert self._read_line(process) == "ready"
        start_s = time.monotonic() + 0.2
        spent_s = sum(map(processor_s, self._gateway))
        for process in used:
            self._write_line(process, str(start_s))
        answers = [
            msgspec.json.decode(self._read_line(process), type=list[Seen]) for process in used
        ]
        spent_s = sum(map(processor_s, self._gateway)) - spent_s
        self.gateway_share = spent_s / (time.monotonic() - start_s)
        return [one for answer in answers for one in answer]

    def burst(self, prompts: Sequence[Sequence[int]], count: int = OUTPUT) -> dict[str, Any]:
        """Send all prompts at once; return throughput and latency."""
        bodies = [open_loop.body_of(NAME, list(prompt), count) for prompt in prompts]
        seen = self.run([Arrival(0.0, body) for body in bodies])
        assert {one.status for one in seen} == {200}, "a request was refused or cut off"
        wall_s = max(one.last_s for one in seen)
        return {
            "wall_s": round(wall_s, 3),
            "tok_s": round(sum(one.tokens for one in seen) / wall_s),
            "first_token_p50_ms": round(statistics.median(one.first_s for one in seen) * 1e3, 1),
            "cached_tokens": sum(one.cached for one in seen),
            "gateway_share": round(self.gateway_share, 2),
        }

    def _write_line(self, process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()

    def _read_line(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()


def drive(clients: Clients, workloads: list[Workload], single: bool, results: Results) -> None:
    """Run each workload cold, then three times warm; with `single`, one prompt of 8,192 tokens."""
    for work in workloads:
        prompts = work.prompts(1)
        cold, *warm = [clients.burst(prompts) for _ in range(4)]
        results.add({"workload": work.name, "cold": cold, "warm": warm})
    if single:
        prompt = Workload("W5", 1, ((1, 8_192),)).prompts(5)
        times = [clients.burst(prompt, 1)["first_token_p50_ms"] for _ in range(6)]
        results.add({"workload": "W5 TTFT", "cold_ms": times[0], "warm_ms": times[1:]})


def drive_open_loop(clients: Clients, options: argparse.Namespace, results: Results) -> None:
    """Run the rates, the cold prompts and the mixtures that were asked for."""
    runs: list[tuple[str, tuple[list[list[int]], list[Arrival]]]] = [
        (f"{rate}/s", open_loop.steady(NAME, rate, options.seconds))
        for rate in numbers(options.rates)
    ]
    if options.cold:
        runs.append(("8 cold beside 64", open_loop.cold_beside_decoding(NAME)))
    if options.neighbours:
        others: tuple[open_loop.OtherTenant | None, ...] = (None, "prompts", None, "streams")
        runs += [
            (
                f"quiet tenant beside {other}" if other else "quiet tenant alone",
                open_loop.quiet(NAME, options.seconds, other),
            )
            for other in others
        ]
    runs += [
        (f"mixture {rate}/s", open_loop.mixture(NAME, rate, options.seconds))
        for rate in numbers(options.mixture)
    ]
    for name, (warm, arrivals) in runs:
        if warm:
            clients.burst(warm, 1)
        line = open_loop.summary(name, clients.run(arrivals))
        share = round(clients.gateway_share, 2)
        results.add({"workload": name, "line": line, "gateway_share": share})


def numbers(text: str) -> list[int]:
    """Return the numbers of a list with commas."""
    return [int(one) for one in text.split(",") if one]


@contextmanager
def run_server(command: Sequence[str]) -> Iterator[int]:
    """Start the server and give the id of its process once it is ready; stop it at the end."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            assert line.startswith("ready"), f"unexpected line from the server: {line!r}"
            yield server.pid
        finally:
            server.terminate()
            server.wait(30)


def measure(options: argparse.Namespace, results: Results) -> None:
    """Start what is measured, run the workloads, stop it."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        data = Path(folder)
        write_model(data / "model", SHAPES[options.shape])
        if options.processes > 1:
            services = opened.enter_context(gpu_fleet.shared_services(data))
            options.database, options.shared = services
        command = [
            *(sys.executable, "-m", MODULE, "--serve", folder),
            *("--database", options.database),
            *("--shared", options.shared),
            *("--sequences", str(options.sequences)),
            *("--gpus", options.gpus),
            *("--replicas", str(options.replicas)),
            *("--processes", str(options.processes)),
            *("--gap-target-shared-ms", str(options.gap_target_shared_ms)),
            *("--host-mib", str(options.host_mib)),
            *(["--apart"] if options.apart else []),
        ]
        started = time.perf_counter()
        keys = write_keys(config_of(data, options))
        gpu_fleet.certify(data, options.replicas)
        engines = opened.enter_context(gpu_fleet.EngineProcesses(command, options.replicas))
        server = opened.enter_context(run_server(command))
        for process in range(options.processes if options.replicas else 0):
            engines.wait_ready(f"http://127.0.0.1:{ADMIN_PORT + process}", READY_TIMEOUT_S)
        print_line(f"ready after {time.perf_counter() - started:.1f} s")
        pids = gpu_fleet.gateway_pids(server, options.processes)
        clients = opened.enter_context(closing(Clients(keys, options.clients, pids)))
        names = options.only.split(",")
        drive(clients, [work for work in WORKLOADS if work.name in names], "W5" in names, results)
        drive_open_loop(clients, options, results)
        if options.replicas:
            results.add(gpu_fleet.moved(f"http://127.0.0.1:{ADMIN_PORT}"))


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="W1,W2,W5")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rates", default="", help="requests per second, with commas")
    parser.add_argument("--mixture", default="", help="rates of the mixture, with commas")
    parser.add_argument("--cold", action="store_true", help="8 cold prompts beside 64 streams")
    parser.add_argument("--shape", choices=SHAPES, default="Llama-3.1-8B")
    parser.add_argument("--neighbours", action="store_true", help="a quiet tenant, another busy")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--gpus", default="", help="the GPUs of the engine, with commas")
    parser.add_argument("--replicas", type=int, default=0, help="engines elsewhere, a GPU each")
    parser.add_argument("--host-mib", type=int, default=0, help="needed for fetches")
    parser.add_argument("--apart", action="store_true", help="prompts on the first replica")
    parser.add_argument("--processes", type=int, default=1, help="of the gateway; needs replicas")
    parser.add_argument("--gap-target-shared-ms", type=float, default=0.0)
    for name, kind in (("serve", Path), ("engine", int), ("process", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--database", default="trunkline.db", help=argparse.SUPPRESS)
    parser.add_argument("--shared", default="", help=argparse.SUPPRESS)
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """Run the workloads, or what they need in processes of its own."""
    options = arguments().parse_args()
    if options.client or options.serve is not None:
        run_role(options)
        return 0
    results = Results()
    measure(options, results)
    results.write(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
