"""F4 and F10 on a cluster: Spark runs a task twice at once, on two workers, and one or all are cut from Postgres."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from exactly_once.embedded.ports import free_port
from exactly_once.embedded.proxy import ADVANCE_AND_COMMIT, PostgresProxy
from tests.spark.standalone import HOSTS
from tests.spark.twins import ATTEMPTS, GO
from tests.support import journal
from tests.support.require import skip_unless
from tests.support.spark import Driver
from tests.support.topics import create_topic, produce
from tests.support.waiting import SPARK_SECONDS, until

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from spark_sink.options import Transaction

COUNT = 1000
both = pytest.mark.parametrize("transaction", ["batch", "partition"])


class Cluster(NamedTuple):
    """A master, and before each worker's Postgres a proxy."""

    url: str
    proxies: dict[str, PostgresProxy]


def commits(proxy: PostgresProxy) -> int:
    """How often clients have asked for the COMMIT of a batch; signs of life pass as well."""
    return sum(re.search(ADVANCE_AND_COMMIT, sql) is not None for sql in list(proxy.statements))


def lacking() -> str | None:
    """Tell why this machine has no second loopback address."""
    try:
        for host in HOSTS:
            socket.create_server((host, 0)).close()
    except OSError as error:
        return f"no address {host} on this machine: {error}"
    return None


@pytest.fixture(scope="module")
def cluster(needs_spark: None, journaled: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    skip_unless("loopback", lacking())
    port, place = free_port(), tmp_path_factory.mktemp("standalone")
    with PostgresProxy(journaled, record=True) as first, PostgresProxy(journaled, record=True) as second:
        ports = [str(proxy.port) for proxy in (first, second)]
        with Driver("-m", "tests.spark.standalone", str(port), str(place), *ports) as processes:
            processes.wait("Registering worker", count=2)
            yield Cluster(f"spark://127.0.0.1:{port}", dict(zip(HOSTS, (first, second), strict=True)))


class Twins:
    """A topic that a driver on the cluster writes, each of whose tasks runs twice."""

    def __init__(self, cluster: Cluster, bootstrap_servers: str, conninfo: str, place: Path) -> None:
        self.cluster = cluster
        self.bootstrap_servers = bootstrap_servers
        self.conninfo = conninfo
        self.place = place
        self.tasks = 0
        self.topic = create_topic(bootstrap_servers, 2)
        produce(bootstrap_servers, self.topic, COUNT, 2)

    def driver(self, transaction: Transaction) -> Driver:
        """Start it; who runs it says in PGHOST and PGPORT where Postgres is."""
        self.tasks = {"batch": 1, "partition": 2}[transaction]
        # Without a host and a port, for each process has them in its environment.
        given = {key: value for key, value in conninfo_to_dict(self.conninfo).items() if key not in ("host", "port")}
        where = (self.cluster.url, self.bootstrap_servers, make_conninfo("", **given), self.topic, str(self.place))
        return Driver("-m", "tests.spark.twins", *where, transaction)

    def wait(self, driver: Driver) -> dict[str, list[str]]:
        """Return the workers of each task's attempts, when each task has two that have copied their rows."""
        try:
            return until(self._twins, SPARK_SECONDS, "two attempts of each task, their rows copied")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{driver.story()}") from error

    def _twins(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for file in sorted((self.place / ATTEMPTS).glob("[0-9]*-[0-9]")):
            found.setdefault(file.name.partition("-")[0], []).append(file.read_text())
        return found if len(found) == self.tasks and all(len(hosts) > 1 for hosts in found.values()) else {}

    def go(self) -> None:
        """Let all attempts go on."""
        (self.place / ATTEMPTS / GO).touch()

    def go_dark(self, attempts: list[str]) -> None:
        """Let all of them, told by their workers, send COMMIT into the dark; then they lose their connections.

        As where the network drops packets: the kernel gives up after tcp_user_timeout, and new connections find nobody.
        """
        proxies = self.cluster.proxies
        for proxy in proxies.values():
            proxy.black_hole()
        sent = {host: commits(proxy) + attempts.count(host) for host, proxy in proxies.items()}
        self.go()
        until(lambda: all(commits(proxies[host]) >= n for host, n in sent.items()), SPARK_SECONDS, "each COMMIT")
        for proxy in proxies.values():
            proxy.cut_all()

    def check(self) -> None:
        """See that the journal is the topic, and that the ledger stands at its end."""
        verdict = journal.check(self.conninfo, self.bootstrap_servers, self.topic, counts=False)
        assert verdict.messages == COUNT
        assert verdict.exact, str(verdict)
        assert self.ledger() == [(0, COUNT // 2), (1, COUNT // 2)]

    def ledger(self) -> list[tuple[int, int]]:
        """Return where the ledger stands."""
        with psycopg.connect(self.conninfo) as connection:
            query = "SELECT partition, next_offset FROM exactly_once.ledger WHERE topic = %s ORDER BY 1"
            return connection.execute(query, (self.topic,)).fetchall()


@pytest.fixture
def twins(
    cluster: Cluster, bootstrap_servers: str, journaled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Twins]:
    given = conninfo_to_dict(journaled)
    monkeypatch.setenv("PGHOST", str(given["host"]))
    monkeypatch.setenv("PGPORT", str(given["port"]))
    yield Twins(cluster, bootstrap_servers, journaled, tmp_path)
    for proxy in cluster.proxies.values():
        proxy.cut_all()
        proxy.heal()


@pytest.mark.fault("F4")
@both
def test_of_two_attempts_that_run_at_once_one_lands(twins: Twins, transaction: Transaction) -> None:
    with twins.driver(transaction) as driver:
        found = twins.wait(driver)
        assert all(set(hosts) == set(HOSTS) for hosts in found.values())
        twins.go()
        assert driver.wait_ended() == 0, driver.story()
    twins.check()


@both
def test_an_attempt_cut_from_postgres_alone_does_not_keep_its_twin_from_landing(
    twins: Twins, transaction: Transaction
) -> None:
    """Its worker goes on talking to Spark and Kafka; only COMMIT goes into the dark, and nothing tells so."""
    with twins.driver(transaction) as driver:
        found = twins.wait(driver)
        twins.cluster.proxies[found.popitem()[1][0]].black_hole()
        twins.go()
        assert driver.wait_ended() == 0, driver.story()
    twins.check()


@pytest.mark.fault("F10")
@pytest.mark.timeout(4 * SPARK_SECONDS)
@pytest.mark.parametrize(("transaction", "cut"), [("batch", "silent"), ("partition", "refused")])
def test_a_batch_whose_workers_are_all_cut_from_postgres_fails_and_is_replayed(
    twins: Twins, transaction: Transaction, cut: str
) -> None:
    """The driver is not: it hears of the cut from its tasks only, and fails when they have failed often enough."""
    proxies = twins.cluster.proxies.values()
    with twins.driver(transaction) as driver:
        attempts = [host for hosts in twins.wait(driver).values() for host in hosts]
        if cut == "refused":
            for proxy in proxies:
                proxy.refuse()
            twins.go()
        else:
            twins.go_dark(attempts)
        told = driver.wait("failed")
        assert driver.wait_ended() == 1, driver.story()
    assert any(f"{proxy.port}" in told for proxy in proxies), f"it does not say which server is away: {told}"
    assert twins.ledger() == [(0, 0), (1, 0)]
    for proxy in proxies:
        proxy.heal()
    with twins.driver(transaction) as driver:
        assert driver.wait_ended() == 0, driver.story()
    twins.check()
