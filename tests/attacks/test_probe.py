"""The probe itself: it sees no fault in a server that is left alone, and a fault that is there."""

from __future__ import annotations

import pytest

from tests.attacks.attacked_server import AttackedServer, flood
from tests.attacks.probe import Observed, Probe, check_undisturbed

FAST = tuple(0.005 for _ in range(100))
QUIET = Observed(FAST, FAST, {"200": 100}, 1_000, 900)
FAULTS = {
    "slow": Observed(tuple(0.5 for _ in FAST), FAST, {"200": 100}, 1_000, 900),
    "refused": Observed(FAST, FAST, {"200": 99, "503": 1}, 1_000, 900),
    "evicted": Observed(FAST, FAST, {"200": 100}, 1_000, 800),
    "paused": Observed(FAST, (*FAST, 0.2), {"200": 100}, 1_000, 900),
}


def test_quiet_run_passes() -> None:
    """Equal runs differ by nothing."""
    check_undisturbed(QUIET, QUIET)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found(fault: str) -> None:
    """A check that finds nothing proves nothing."""
    with pytest.raises(AssertionError):
        check_undisturbed(QUIET, FAULTS[fault])


@pytest.mark.slow
def test_small_requests_of_another_tenant_do_not_disturb(server: AttackedServer) -> None:
    """The harness: two tenants, one of which sends small requests from two connections."""
    quiet = Probe(server, server.tenant("quiet-probe"))
    busy = server.tenant("busy-probe")
    alone = quiet.observe_alone()
    with flood(lambda: server.ask(busy, "/v1/chat/completions", server.chat()).status, 2) as done:
        beside = quiet.observe()

    check_undisturbed(alone, beside, pause_s=None)
    assert done
    assert set(done) == {200}
