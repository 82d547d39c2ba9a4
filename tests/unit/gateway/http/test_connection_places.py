"""Places of connections: strangers, tenants, and who gives way in a full listener."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from hypothesis import given
from hypothesis import strategies as st

from gateway.http.connection_places import ConnectionPlaces


class Client:
    """A connection; its places are given back when it is lost, a turn after it was aborted."""

    def __init__(self, places: ConnectionPlaces[Client], address: str = "local") -> None:
        self.address = address
        self.payer: Hashable = None
        self.is_aborted = False
        self._places = places
        self.is_admitted = places.admit(self)

    def abort(self) -> None:
        assert not self.is_aborted, "a connection gives way once"
        self.is_aborted = True

    def ask(self, payer: Hashable) -> Client:
        """Show a key, and be idle again."""
        self._places.set_busy(self)
        self._places.move(self, payer)
        self._places.set_idle(self)
        return self


def settle(places: ConnectionPlaces[Client], clients: list[Client]) -> None:
    """Release those that were aborted, as the event loop does."""
    for client in [one for one in clients if one.is_aborted]:
        clients.remove(client)
        places.release(client)


def test_strangers_give_way_oldest_first_and_keep_tenants_places() -> None:
    """Ten thousand idle strangers leave a client with a key its connection, and a new one."""
    places = ConnectionPlaces[Client](16, 0)
    keyed = [Client(places).ask(1) for _ in range(4)]
    strangers = [Client(places) for _ in range(12)]
    for _ in range(10_000):
        strangers.append(Client(places))
        oldest = strangers[0]
        assert strangers[-1].is_admitted
        assert oldest.is_aborted
        settle(places, strangers)
    late = Client(places).ask(2)

    assert late.is_admitted
    assert not any(one.is_aborted for one in (*keyed, late))
    assert len(strangers) == 12


def test_strangers_hold_three_quarters_of_an_empty_listener() -> None:
    """The rest is free for clients whose keys are known."""
    places = ConnectionPlaces[Client](16, 0)
    clients = [Client(places) for _ in range(13)]

    assert [one.is_aborted for one in clients] == [True, *[False] * 12]


def test_busy_strangers_are_not_closed() -> None:
    """A request in progress is answered; a newcomer is refused instead."""
    places = ConnectionPlaces[Client](4, 0)
    for _ in range(3):
        places.set_busy(Client(places))

    assert not Client(places).is_admitted


def test_largest_tenant_gives_way_where_no_stranger_can() -> None:
    """One tenant's idle pool of connections does not keep the others out."""
    places = ConnectionPlaces[Client](8, 0)
    hoard = [Client(places).ask("hoarder") for _ in range(6)]
    small = [Client(places).ask("small") for _ in range(2)]
    newcomer = Client(places)

    assert newcomer.is_admitted
    assert [one.is_aborted for one in hoard] == [True, *[False] * 5]
    assert not any(one.is_aborted for one in small)


def test_address_limit_comes_first() -> None:
    """One address takes no place of the others by trying."""
    places = ConnectionPlaces[Client](8, 2)
    clients = [Client(places, "198.51.100.1") for _ in range(3)]
    other = Client(places, "198.51.100.2")

    assert [one.is_admitted for one in (*clients, other)] == [True, True, False, True]
    assert not any(one.is_aborted for one in clients)


def test_tenants_that_share_an_address_do_not_keep_each_other_out() -> None:
    """Behind one router or proxy: a connection counts for its address until it has shown a key."""
    places = ConnectionPlaces[Client](8, 2)
    busy = [Client(places, "198.51.100.1").ask("busy") for _ in range(5)]
    quiet = Client(places, "198.51.100.1").ask("quiet")
    strangers = [Client(places, "198.51.100.1") for _ in range(3)]
    places.release(busy[0])
    places.release(strangers[0])
    later = [Client(places, "198.51.100.1") for _ in range(2)]

    assert all(one.is_admitted for one in busy)
    assert quiet.is_admitted
    assert [one.is_admitted for one in (*strangers, *later)] == [True, True, False, True, False]


@given(
    st.lists(
        st.tuples(st.sampled_from(["open", "ask", "hold", "close"]), st.integers(0, 99)),
        max_size=120,
    )
)
def test_counts_agree_with_the_clients(history: list[tuple[str, int]]) -> None:
    """After any events, the places taken are those of open connections, within the limits."""
    places = ConnectionPlaces[Client](8, 5)
    clients: list[Client] = []
    for what, number in history:
        if what == "open":
            client = Client(places, f"address {number % 3}")
            if client.is_admitted:
                clients.append(client)
        elif clients:
            client = clients[number % len(clients)]
            if what == "ask":
                client.ask(number % 4)
            elif what == "hold":
                places.set_busy(client)
            else:
                clients.remove(client)
                places.release(client)
        settle(places, clients)

        owners = Counter(client.payer for client in clients)
        assert places.taken == len(clients) <= 8
        assert owners[None] <= 6
        strangers = Counter(client.address for client in clients if client.payer is None)
        assert max(strangers.values(), default=0) <= 5
    for client in clients:
        places.release(client)
    assert places.taken == 0
