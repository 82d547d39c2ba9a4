"""The memory through which the lanes of an engine sum their parts, and gather their logits.

Each lane has an exchange: buffers that its peers address, and its flags. It knows no layer and no
step. `engine.lanes.ops` uses it; `kernels.gpu.peer_reduce` has the rules of meetings.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from msgspec import Struct

from engine.errors import ModelError
from engine.lanes.crew import Crew
from kernels import reference_lanes
from kernels.gpu import peer_reduce
from kernels.gpu.peer_reduce import GATHER_PROGRAMS, Meeting

SUM_BUFFERS = 3
"""Of sums: one for a step's first meeting, two in turn for the others. Steps may have an odd number
of meetings, and no two in a row may share a buffer, the last of a step and the first of the next
included."""
GATHER_BUFFERS = 2
"""Of logits: two in turn, as prompt logprobs gather several times in a row."""
POLLS_PER_S = 1_000_000
"""Polls of a flag in a second, about: each takes the time of a load past all caches, and a
barrier."""
WAIT_S = 10.0
"""The longest that a kernel waits for a peer, about; a step may take `step_timeout_s`, 60 s."""
CHECKED_SUMS = 64
"""Sums that are compared with the host's before an engine serves."""
CHECKED_ROWS = 64
"""Rows of each."""
ALREADY_ENABLED = 704
"""The runtime's answer where peers can address each other already."""


class ExchangeSize(Struct, frozen=True):
    """Most rows of a step, channels of a row, most rows of logits, and columns of a lane's part of
    them."""

    rows: int
    channels: int
    draws: int
    columns: int


class Exchange:
    """One lane's end of all meetings. Its methods run in a crew, or while a graph is captured."""

    def __init__(
        self, crew: Crew, meeting: Meeting, sums: torch.Tensor, logits: torch.Tensor,
        tables: torch.Tensor, kept: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        """`sums` [3, rows, C], `logits` [2, draws, N]; `tables` [5, lanes] int64: the addresses of
        these buffers on each lane. `kept`: the memory of all lanes that addresses point to."""
        self._kept = tuple(kept)
        self.lane, self.lanes = meeting.lane, meeting.lanes
        self._crew, self._meeting = crew, meeting
        self._sums, self._logits, self._tables = sums, logits, tables
        self._sum = self._gather = 0
        self._is_taken = False
        self._is_cuda = sums.is_cuda
        self._limit = int(WAIT_S * POLLS_PER_S)

    def begin(self) -> None:
        """Begin a step: its first meeting has a buffer of its own."""
        self._sum = self._gather = 0
        self._is_taken = False

    def part(self, rows: int) -> torch.Tensor:
        """Return memory for this lane's part [rows, C] of the next sum: where its peers read it, if
        no other part lies there."""
        if self._is_taken:
            return torch.empty_like(self._sums[0, :rows])
        self._is_taken = True
        return self._sums[self._sum, :rows]

    def logits_part(self, rows: int) -> torch.Tensor:
        """Return where this lane's logits [rows, N] go."""
        return self._logits[self._gather, :rows]

    def sum(
        self, part: torch.Tensor, total: torch.Tensor, *, add: bool,
        weight: torch.Tensor | None = None, out: torch.Tensor | None = None, eps: float = 0.0,
        scales: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """total = the sum of all lanes' parts, and of `total` with `add`; out = its norm. See
        `peer_reduce.sum_parts`. A part that does not lie where peers read it is copied there."""
        _put(part, self._sums[self._sum, : len(part)])
        table, self._sum = self._tables[self._sum], self._sum % 2 + 1
        self._is_taken = False
        peer_reduce.sum_parts(
            table, self._meeting, self._meet(), total, add=add, weight=weight, out=out, eps=eps,
            scales=scales,
        )  # fmt: skip

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return all lanes' logits [rows, V] side by side."""
        rows, columns = part.shape
        _put(part, self.logits_part(rows))
        table = self._tables[SUM_BUFFERS + self._gather]
        self._gather = 1 - self._gather
        out = part.new_empty(rows, columns * self.lanes)
        peer_reduce.gather_parts(table, self._meeting, self._meet(), out)
        return out

    @property
    def has_failed(self) -> bool:
        """Whether a wait of a kernel has ended without its peer. The device writes it."""
        return bool(self._meeting.told[0])

    def _meet(self) -> int:
        """Return how often the launch may poll for its peers. In a graph it does; otherwise the
        crew has ordered the streams, and it need not."""
        if self._is_cuda and torch.cuda.is_current_stream_capturing():
            return self._limit
        self._crew.meet(self.lane)
        return 0

    def check_sums(self, sums: int) -> bool:
        """Return whether so many sums, met by flags, are the host's. All lanes at once."""
        _, slots, channels = self._sums.shape
        rows, dtype = min(CHECKED_ROWS, slots), self._sums.dtype
        generators = [torch.Generator().manual_seed(lane) for lane in range(self.lanes)]
        parts = [torch.randint(-8, 9, (rows, channels), generator=g).to(dtype) for g in generators]
        expected = reference_lanes.sum_parts(parts)
        own = parts[self.lane].to(self._sums.device)
        totals = self._sums.new_zeros(sums, rows, channels)
        self._load(totals[0])
        self.begin()
        for index in range(sums):
            self._sums[self._sum, :rows].copy_(own if index % 2 else -own)
            table, self._sum = self._tables[self._sum], self._sum % 2 + 1
            limit = self._limit
            if not self._is_cuda:  # one lane computes at a time
                self._crew.meet(self.lane)
                limit = 0
            peer_reduce.sum_parts(table, self._meeting, limit, totals[index], add=False)
        found = totals.cpu()
        is_right = torch.equal(found[1::2], expected.expand_as(found[1::2]))
        is_right &= torch.equal(found[::2], -expected.expand_as(found[::2]))
        return is_right and not self.has_failed

    def _load(self, total: torch.Tensor) -> None:
        """Have the kernel compiled and loaded on all lanes, before one polls for another: launch it
        where it gives up at once. All lanes raise the same flags by that."""
        peer_reduce.sum_parts(self._tables[0], self._meeting, 1, total, add=False)
        if self._is_cuda:
            torch.cuda.current_stream().synchronize()
        self._crew.meet(self.lane)
        self._meeting.failed.zero_()
        self._meeting.told.zero_()
        self._crew.meet(self.lane)


def exchanges(crew: Crew, size: ExchangeSize, dtype: torch.dtype) -> list[Exchange]:
    """Return an exchange for each lane of a crew. Raises ModelError where the devices cannot
    address each other."""
    lanes = len(crew.devices)
    if crew.devices[0].type == "cuda":
        reach_peers(crew)
    slots = max(size.rows, size.draws * GATHER_PROGRAMS)

    def made(shape: Sequence[int], kind: torch.dtype) -> list[torch.Tensor]:
        return [torch.zeros(tuple(shape), dtype=kind, device=one) for one in crew.devices]

    sums = made((SUM_BUFFERS, size.rows, size.channels), dtype)
    logits = made((GATHER_BUFFERS, size.draws, size.columns), dtype)
    flags = made((slots, lanes), torch.int32)
    counts, failed = made((slots,), torch.int32), made((1,), torch.int32)
    by_lane = [[*own.unbind(), *beside.unbind()] for own, beside in zip(sums, logits, strict=True)]
    addresses = [[one.data_ptr() for one in same] for same in zip(*by_lane, strict=True)]
    found = []
    for lane, device in enumerate(crew.devices):
        told = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        table = torch.tensor([one.data_ptr() for one in flags], device=device)
        meeting = Meeting(lane, lanes, table, counts[lane], failed[lane], told)
        tables = torch.tensor(addresses, device=device)
        kept = (*sums, *logits, *flags)
        found.append(Exchange(crew, meeting, sums[lane], logits[lane], tables, kept))
    if crew.devices[0].type == "cuda":
        for device in crew.devices:
            torch.cuda.synchronize(device)
    return found


def reach_peers(crew: Crew) -> None:
    """Let each device address the others' memory. Raises ModelError `unsupported` where one
    cannot."""
    major = (torch.version.cuda or "0").split(".")[0]
    enable = ctypes.CDLL(f"libcudart.so.{major}").cudaDeviceEnablePeerAccess
    last_error = ctypes.CDLL(f"libcudart.so.{major}").cudaGetLastError
    for lane, device in enumerate(crew.devices):
        for peer in crew.devices:
            if peer == device:
                continue
            if not torch.cuda.can_device_access_peer(device, peer):
                raise ModelError(
                    "unsupported",
                    f"engine.gpus: {device} cannot address the memory of {peer}; expected GPUs with"
                    " peer access: NVLink, or PCIe without IOMMU and ACS",
                )
            # torch enables access at the first copy, for the memory of its allocator.
            torch.ones(8, device=device).to(peer)
            with crew.on(lane):
                error = enable(peer.index, 0)
                last_error()  # the next launch would report it
                if error not in (0, ALREADY_ENABLED):
                    torch.cuda.check_error(error)


def check_exchanges(crew: Crew, found: Sequence[Exchange], sums: int = CHECKED_SUMS) -> None:
    """Raise ModelError `unsupported` if the devices' sums are not the host's."""
    if not all(crew.run(lambda lane: found[lane].check_sums(sums))):
        raise ModelError(
            "unsupported",
            "engine.gpus: sums over the GPUs are wrong: their writes to each other's memory are"
            " lost or late; turn off IOMMU and ACS of the PCIe bridges between them",
        )


def _put(part: torch.Tensor, target: torch.Tensor) -> None:
    if part.data_ptr() != target.data_ptr():
        target.copy_(part)
