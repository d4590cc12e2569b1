"""Options of the data source: strings, under names whose case Spark forgets. No servers, no Spark."""

from __future__ import annotations

import pytest
from psycopg.conninfo import conninfo_to_dict

from exactly_once.errors import ConfigurationError
from spark_sink.options import check_source_options

NEEDED = {"conninfo": "dbname=x", "table": "t", "groupId": "g"}


def test_names_are_those_of_the_sink_whatever_their_case_and_underscores() -> None:
    options = check_source_options(
        {
            "conninfo": "dbname=x",
            "TABLE": "t",
            "groupid": "g",
            "mode": "upsert",
            "key": "a, b",
            "take_over": "True",
            "topicColumn": "place",
            "reapafterseconds": "60",
            "checkpointLocation": "/checkpoint",
            "queryName": "of Spark",
        }
    )
    assert (options.group_id, options.key, options.take_over) == ("g", ("a", "b"), True)
    assert (options.topic_column, options.reap_after_seconds) == ("place", 60.0)
    assert options.checkpoint_location == "/checkpoint"
    assert (options.ledger, options.schema) == ("offsets", "exactly_once")


def test_settings_of_kafka_and_a_password_of_its_own_are_taken() -> None:
    servers = {"bootstrapServers": "h:1", "kafka.security.protocol": "SSL"}
    given = servers | {"password": "se cret", "conninfo": "postgresql://u@h/d"}
    options = check_source_options(NEEDED | given)
    assert options.kafka == {"security.protocol": "SSL"}
    assert conninfo_to_dict(options.conninfo) == {"user": "u", "host": "h", "dbname": "d", "password": "se cret"}
    assert "se cret" not in repr(options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tabel": "t"}, "no option tabel.*conninfo, table, groupId"),
        ({"kafka": "x"}, r"no option kafka;.*, kafka\.\*"),
        ({"smallBatch": "1"}, "smallBatch is an option of PostgresSink"),
        ({"takeOver": "yes"}, "takeOver='yes'.*true or false"),
        ({"reapAfterSeconds": "soon"}, "positive number"),
        ({"reapAfterSeconds": "0"}, "positive number"),
        ({"reapAfterSeconds": "nan"}, "positive number"),
        ({"mode": "merge"}, "mode='merge'"),
        ({"table": ""}, "table="),
        ({"bootstrapServers": ""}, "bootstrap_servers='' is empty"),
        ({"schema": ""}, "schema='' is empty"),
        ({"mode": "replace"}, "ledger='batch-id'"),
        ({"jobId": "x"}, "jobId is for batch jobs with ledger=batch-id"),
    ],
)
def test_what_cannot_work_is_refused_with_what_can(options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        check_source_options(NEEDED | options)
