"""Kafka and Postgres together, started at the same time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from .kafka import Kafka
from .postgres import Postgres


class Servers:
    """Hold a running Kafka and a running Postgres; leaving the ``with`` statement ends both."""

    def __init__(self, kafka: Kafka, postgres: Postgres) -> None:
        self.kafka = kafka
        self.postgres = postgres

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.kafka!r} {self.postgres!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def bootstrap_servers(self) -> str:
        """Return Kafka's addresses."""
        return self.kafka.bootstrap_servers

    @property
    def conninfo(self) -> str:
        """Return Postgres' libpq URI."""
        return self.postgres.conninfo

    def close(self) -> None:
        """End both servers and delete their data; may be called again."""
        # An error of the one must not leave the other running.
        try:
            self.kafka.close()
        finally:
            self.postgres.close()


def start(
    *,
    brokers: int = 1,
    properties: Mapping[str, str] | None = None,
    settings: Mapping[str, str] | None = None,
) -> Servers:
    """Start Kafka and Postgres in temporary directories; return when both are up.

    *properties* go to the brokers, *settings* to Postgres.
    """
    servers = Servers(Kafka(brokers=brokers, properties=properties), Postgres(settings=settings))
    try:
        # The brokers boot while Postgres starts.
        servers.kafka.start(wait=False)
        servers.postgres.start()
        servers.kafka.wait()
    except BaseException:
        servers.close()
        raise
    return servers
