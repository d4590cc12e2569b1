"""Options of the sink: checked when it is made. No servers, no Spark."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from exactly_once.errors import ConfigurationError
from spark_sink import PostgresSink
from spark_sink.offset_log import OffsetLog, reader
from spark_sink.stream_query import find

NEEDED: dict[str, Any] = {"conninfo": "dbname=x", "table": "t", "group_id": "g"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "merge"}, "mode='merge'.*append, upsert"),
        ({"transaction": "task"}, "transaction='task'.*batch, partition"),
        ({"ledger": "ids"}, "ledger='ids'.*offsets, batch-id"),
        ({"conninfo": "no such thing"}, "conninfo"),
        ({"conninfo": None}, "conninfo= must be a connection string, not NoneType"),
        ({"kafka": {"security.protocol": "SSL"}}, "kafka= is about a cluster.*add bootstrap_servers="),
        ({"bootstrap_servers": ["localhost:9092"]}, "bootstrap_servers= must be text"),
        ({"table": ""}, "table="),
        ({"group_id": ""}, "group_id="),
        ({"topic_column": "offset"}, "must differ"),
        ({"ledger": "batch-id", "transaction": "partition"}, "written whole"),
        ({"mode": "replace"}, "ledger='batch-id'"),
        ({"key": ["id"]}, "key= is about rows that exist"),
        ({"mode": "upsert", "key": "id"}, r"key=\['id'\]"),
        ({"create_table": "yes"}, "create_table='yes'.*True, False"),
        ({"evolve": "drop-columns"}, "evolve='drop-columns'.*add-columns, None"),
        ({"table": None, "tables": {"t": {"evolve": True}}}, "evolve=True.*add-columns, None"),
        ({"table": None, "tables": {"t": {}}, "create_table": True}, "tables= has for each table.*create_table="),
    ],
)
def test_what_cannot_work_is_refused_with_what_can(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        PostgresSink(**NEEDED | options)


def test_a_sink_can_be_sent_to_another_process_and_released_before_it_has_run() -> None:
    sink = pickle.loads(pickle.dumps(PostgresSink(**NEEDED)))
    sink.release()


def test_importing_the_sink_does_not_import_spark() -> None:
    """Executors that only write, and programs that only configure, need not pay for it."""
    code = "import sys, spark_sink; print([name for name in sys.modules if name.startswith('pyspark')])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "[]"


class ConnectSession:
    """Stands in for a session of Spark Connect, which needs a server: it has neither a JVM nor a context."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def test_over_spark_connect_the_checkpoint_tells_the_query(tmp_path: Path) -> None:
    session: Any = ConnectSession()
    assert find(session) is None
    (tmp_path / "metadata").write_text('{"id":"4f8e3b1c"}')
    for location in (str(tmp_path), tmp_path.as_uri()):
        assert OffsetLog(location, reader(location, session)).query_id() == "4f8e3b1c"


def test_over_spark_connect_a_checkpoint_that_is_elsewhere_is_refused() -> None:
    session: Any = ConnectSession()
    with pytest.raises(ConfigurationError, match="cannot be read over Spark Connect"):
        reader("s3a://bucket/checkpoint", session)
