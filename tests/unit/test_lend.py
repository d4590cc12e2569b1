"""Connections that are lent to a handler, where a tracer has wrapped them: a stand-in, for none is installed."""

from __future__ import annotations

from typing import Any

from exactly_once.ledger.session import lend, take_back


class Connection:
    """What is wrapped."""

    def cursor(self) -> str:
        return "cursor"

    def transaction(self) -> str:
        return "transaction"

    def pipeline(self) -> str:
        return "pipeline"


class Traced:
    """As tracers make it: all attributes are those of the connection, and some methods its own."""

    def __init__(self, wrapped: Connection) -> None:
        object.__setattr__(self, "__wrapped__", wrapped)

    def __getattribute__(self, name: str) -> Any:
        wrapped = object.__getattribute__(self, "__wrapped__")
        if name == "__wrapped__":
            return wrapped
        if name == "cursor":
            return lambda: f"traced {wrapped.cursor()}"
        return getattr(wrapped, name)


def test_a_connection_in_a_tracers_proxy_is_lent_and_taken_back() -> None:
    traced: Any = Traced(Connection())
    uses: list[str] = []
    for _ in range(2):
        lend(traced, lambda: uses.append("used"))
        assert (traced.cursor(), traced.transaction(), traced.pipeline()) == (
            "traced cursor",
            "transaction",
            "pipeline",
        )
    assert uses == ["used"] * 6
    take_back(traced)
    assert traced.cursor() == "traced cursor"
    assert uses == ["used"] * 6
