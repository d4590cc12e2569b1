"""Every log record of the library says in fields what happened and where."""

from __future__ import annotations

import ast
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

import exactly_once
from exactly_once._log import about
from exactly_once._model import Advance, Partition
from exactly_once.consumer.partitions import Resolution
from exactly_once.consumer.rebalance import Change
from exactly_once.ledger.conflict import Conflict
from tests.integration.scene import Scene
from tests.observe.looking import fields
from tests.support.findings import nothing
from tests.support.worker import record

PACKAGE = Path(exactly_once.__file__).parent
PLACES = (
    *(PACKAGE / name for name in ("kafka", "ledger", "metrics", "consumer", "publish", "writer")),
    PACKAGE.parent / "spark_sink",
)
DOCUMENT = PACKAGE.parent / "docs" / "how-to" / "observe.md"
COMPUTED = {change.value for change in Change} | {f"resolved_{r.name.lower()}" for r in Resolution}
COMPUTED |= {verdict.name.lower() for verdict in Conflict if verdict not in (Conflict.OK, Conflict.RECREATED)}
P, Q = Partition("payments", 3), Partition("payments", 4)


class Json(logging.Formatter):
    FIELDS = ("action", "group", "topic", "partition", "offset", "owner_epoch", "partitions")

    def format(self, record: logging.LogRecord) -> str:
        fields = {name: getattr(record, name) for name in self.FIELDS if hasattr(record, name)}
        text = {"at": self.formatTime(record), "level": record.levelname, "message": record.getMessage()}
        if record.exc_info:
            text["error"] = self.formatException(record.exc_info)
        return json.dumps(text | fields)


def calls(name: str) -> Iterator[tuple[str, ast.Call]]:
    """Find the calls of ``….name(…)`` or ``name(…)`` in what users run, with the place of each."""
    for path in sorted(path for place in PLACES for path in place.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and re.fullmatch(name, ast.unparse(node.func)):
                yield f"{path.parent.name}/{path.name}:{node.lineno}", node


def test_every_record_carries_fields() -> None:
    found = list(calls(r"logger\.(?!isEnabledFor)\w+"))
    assert found
    nothing((place for place, call in found if "extra" not in {k.arg for k in call.keywords}), "logs without extra=")


def test_every_action_is_documented_and_every_documented_action_exists() -> None:
    named = {
        node.args[0].value
        for _, node in calls(r"(self\._)?about")
        if node.args and isinstance(node.args[0], ast.Constant)
    }
    documented = set(re.findall(r"^\| `(\w+)` \|", DOCUMENT.read_text("utf-8"), re.MULTILINE))
    assert documented == named | COMPUTED


def test_the_formatter_that_the_documentation_shows_writes_json() -> None:
    entry = logging.makeLogRecord({"msg": "gone", "levelname": "INFO", **about("revoked", group="g", partition=P)})
    written = json.loads(Json().format(entry))
    assert written.pop("at")
    expected = {"action": "revoked", "group": "g", "topic": "payments", "partition": 3}
    assert written == {"level": "INFO", "message": "gone", **expected}


def test_what_is_unknown_is_left_out() -> None:
    assert about("waiting", group="g") == {"action": "waiting", "group": "g"}


def test_one_place_is_written_as_fields_of_its_own() -> None:
    advance = Advance(
        partition=P, token=uuid4(), epoch=7, topic_id=None, expected=100, next_offset=120, leader_epoch=None
    )
    place = {"topic": "payments", "partition": 3}
    assert about("a", several=[advance]) == {"action": "a", **place, "offset": 100, "owner_epoch": 7}
    assert about("a", several=[P]) == {"action": "a", **place}
    assert about("a", partition=P, offset=0, owner_epoch=0) == {"action": "a", **place, "offset": 0, "owner_epoch": 0}


def test_several_places_are_a_list_of_names() -> None:
    assert about("a", several=[P, Q]) == {"action": "a", "partitions": ["payments[3]", "payments[4]"]}


def test_fields_never_collide_with_those_of_a_record() -> None:
    """The logging module refuses that, at the moment something has to be told."""
    everything = {"action", "group", "topic", "partition", "offset", "owner_epoch", "partitions"}
    assert not everything & vars(logging.makeLogRecord({})).keys()


def test_records_of_a_real_run_tell_where(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """A partition is taken, a message is set aside, a commit stays without an answer."""
    consumer = scene.consumer()

    def handler(unit: exactly_once.Unit) -> None:
        record(unit, "test")
        if unit.messages[0].offset() == 0:
            scene.proxy.cut_after()
        if any(message.offset() == 15 for message in unit.messages):
            raise ValueError("this is no payment")

    with caplog.at_level(logging.INFO, logger="exactly_once"):
        consumer.run(handler, on_poison="dead-letter", until_end=True)
    found = {entry.action: fields(entry) for entry in caplog.records if hasattr(entry, "action")}
    here = {"group": scene.topic, "topic": scene.topic, "partition": 0}
    assert found["assigned"] == {"action": "assigned", **here}
    assert found["positioned"] == {"action": "positioned", **here, "offset": 0, "owner_epoch": 1}
    assert found["resolved_committed"] == {"action": "resolved_committed", **here, "offset": 0, "owner_epoch": 1}
    assert found["set_aside"] == {"action": "set_aside", **here, "offset": 15, "owner_epoch": 1}
    assert found["poison_sought"].items() >= here.items()
