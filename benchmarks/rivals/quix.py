"""quixstreams' PostgreSQLSink; it runs in an environment of its own, which :func:`environment` makes.

python quix.py BOOTSTRAP_SERVERS TOPIC CONNINFO
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4


def environment(directory: Path) -> Path:
    """Install quixstreams, which wants other versions of the clients than this project; return its Python."""
    python = directory / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "quixstreams[postgresql]==3.28.1"], check=True)
    return python


def main(bootstrap_servers: str, topic: str, conninfo: str) -> None:
    """Copy the topic until the process is ended."""
    import psycopg2  # noqa: PLC0415 - not installed where environment() is called
    from quixstreams import Application  # noqa: PLC0415
    from quixstreams.sinks.community.postgresql import PostgreSQLSink  # noqa: PLC0415

    place = urlsplit(conninfo)
    with psycopg2.connect(conninfo) as connection, connection.cursor() as cursor:
        cursor.execute("ALTER TABLE payment ADD COLUMN timestamp timestamp")  # it fills one more
    sink = PostgreSQLSink(
        host=place.hostname,
        port=place.port,
        dbname=place.path.lstrip("/"),
        user=place.username,
        password=place.password,
        table_name="payment",
        schema_auto_update=False,
    )
    # A checkpoint each 10,000 messages: with the default of 5 seconds all of a short topic is one transaction.
    app = Application(
        broker_address=bootstrap_servers,
        consumer_group=f"quix-{uuid4().hex[:8]}",
        auto_offset_reset="earliest",
        commit_every=10_000,
        state_dir=tempfile.mkdtemp(),
    )
    frame = app.dataframe(app.topic(topic, value_deserializer="json")).apply(lambda value: value["payload"])
    frame.sink(sink)
    app.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
