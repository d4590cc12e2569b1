"""Tiers: which tests a command runs. Markers follow from the fixtures that a test asks for.

``--tier pure`` runs what needs no server, ``--tier short`` that and one test for each row of docs/faults.md
(``@pytest.mark.fault("A1")``, without ``more=True``), ``--tier all`` everything but containers. Without the option
nothing is left out.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from exactly_once.embedded.process import ServerProcess

TIERS = ("pure", "short", "all")
_FIXTURES = {
    "docker": {"engine"},
    "spark": {"needs_spark"},
    "kafka": {"exactly_once_kafka", "own_servers"},
    "postgres": {"exactly_once_postgres", "own_servers"},
}
"""What a test is marked with, and the fixtures of which it asks for one, directly or through others."""
_LEFT_OUT = "left_out"
_left_out = pytest.StashKey[Counter[str]]()
_item: list[pytest.Item] = []
"""The test that runs now, if any."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--tier", choices=TIERS, help="which tests to run; all that were named, if left out")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers."""
    config.stash[_left_out] = Counter[str]()
    for name in _FIXTURES:
        config.addinivalue_line("markers", f"{name}: needs it; follows from the fixtures")
    config.addinivalue_line(
        "markers",
        "fault(*ids, more=False): provokes these rows of docs/faults.md; more: beside another in the short tier",
    )
    config.addinivalue_line("markers", "short: in the short tier; follows from the other markers")
    config.addinivalue_line(
        "markers", "slow: takes 20 s and more; comes first, and is not in the short tier with servers"
    )


@pytest.hookimpl(tryfirst=True)  # before -m looks for the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests, and deselect those of other tiers."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        for name, asked in _FIXTURES.items():
            if fixtures & asked:
                item.add_marker(name)
    _order_files(items)
    seen: set[str] = set()
    for item in items:
        if _is_short(item, seen):
            item.add_marker("short")
    tier = config.getoption("tier")
    if tier is None:
        return
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        (kept if _belongs(item, tier) else left_out).append(item)
    items[:] = kept
    _order_files(items)  # anew: what takes minutes in another tier is left out perhaps
    config.stash[_left_out] = Counter(_needs(item) for item in left_out)
    config.hook.pytest_deselected(items=left_out)


def _belongs(item: pytest.Item, tier: str) -> bool:
    """Tell whether a tier has the test."""
    if tier == "short":
        return item.get_closest_marker("short") is not None
    return _needs(item) != "docker" if tier == "all" else not _needs(item)


def _is_short(item: pytest.Item, seen: set[str]) -> bool:
    """Tell whether the short tier has the test; of the tests of a fault it has the first that is collected."""
    needs = _needs(item)
    if not needs:
        return True
    if needs == "docker" or item.get_closest_marker("slow"):
        return False
    ids = {fault for mark in item.iter_markers("fault") if not mark.kwargs.get("more") for fault in mark.args}
    is_first = bool(ids - seen)
    seen |= ids
    return is_first


def _order_files(items: list[pytest.Item]) -> None:
    """Order the files so that all processes are busy to the end: minutes of work come first, pure tests last."""
    names = ["slow", *_FIXTURES]
    ranks: dict[Path, int] = {}
    for item in items:
        rank = next((n for n, name in enumerate(names) if item.get_closest_marker(name)), len(names))
        ranks[item.path] = min(rank, ranks.get(item.path, rank))
    items.sort(key=lambda item: ranks[item.path])


def _needs(item: pytest.Item) -> str:
    """Name the rarest thing that a test needs; empty for a pure one."""
    return next((name for name in _FIXTURES if item.get_closest_marker(name)), "")


def pytest_collection_finish() -> None:
    """Take what was imported out of every later garbage collection: half a million objects that stay."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Remember which test runs."""
    _item[:] = [item]
    try:
        return (yield)
    finally:
        _item.clear()


@pytest.fixture(autouse=True, scope="session")
def _pure_tests_start_no_server() -> Generator[None]:
    """Fail a test that starts a server without a fixture that says so: it would run in the wrong tier."""
    start = ServerProcess.__init__

    def checked(self: ServerProcess, *args: Any, **options: Any) -> None:
        assert not _item or _needs(_item[0]), "this test starts a server: ask for the fixture `own_servers`"
        start(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerProcess, "__init__", checked)
        yield


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send what was left out to the process that prints the summary, where tests run in several."""
    output = getattr(session.config, "workeroutput", None)
    left_out = session.config.stash[_left_out]
    if output is not None:
        output[_LEFT_OUT] = dict(left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take it from a worker process; each has collected the same."""
    left_out: dict[str, int] = getattr(node, "workeroutput", {}).get(_LEFT_OUT, {})
    if not node.config.stash[_left_out]:
        node.config.stash[_left_out].update(left_out)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say what was left out, and how to run it."""
    left_out = config.stash[_left_out]
    if not left_out:
        return
    terminalreporter.ensure_newline()
    what = ", ".join(f"{count:,} with {need}" for need, count in sorted(left_out.items()))
    rest = {"all": "the rest", "pure": "all but containers", "short": "all but containers"}[config.getoption("tier")]
    how = "bash .ci/run" if rest == "the rest" else "python3 run.py test --all"
    terminalreporter.write_line(f"left out: {left_out.total():,} tests ({what}); {rest}: {how}")
