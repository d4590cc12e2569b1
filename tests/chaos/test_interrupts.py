"""Interrupts: an exception from a signal handler at any line of the library loses and doubles nothing.

A signal handler may raise between any two lines: Ctrl-C, an alarm that bounds a handler, a service manager's
SystemExit. Here the exception is raised by a trace function instead of a signal, so that a seed names the
line. Whoever catches it and iterates on must get every message once.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from exactly_once import ExactlyOnceConsumer, Redelivered, Unit, UnitNotFinished
from tests.conftest import MakeConsumer
from tests.support import journal
from tests.support.interrupts import SOCKET, Interrupt, Interrupter
from tests.support.seeds import seeds
from tests.support.topics import create_topic, produce
from tests.support.worker import drain, ensure_journal, record

BATCH = 24
pytestmark = pytest.mark.filterwarnings(SOCKET)

INTERRUPTS = int(os.environ.get("EXACTLY_ONCE_INTERRUPTS", "40"))


def _record_deferred(unit: Unit, worker: str) -> None:
    for message in unit.messages:
        unit.defer(journal.APPEND, journal.entry(message, worker))
    unit.defer(journal.COUNT, (unit.messages[0].topic(), len(unit.messages)))


@pytest.mark.slow
@pytest.mark.fault("D2")
@pytest.mark.parametrize(
    ("seed", "effects"), [*((seed, record) for seed in seeds([1, 2, 3], new=1)), (4, _record_deferred)]
)
def test_interrupt_at_any_line_loses_and_doubles_nothing(
    seed: int, effects: Callable[[Unit, str], None], make_consumer: MakeConsumer, bootstrap_servers: str, conninfo: str
) -> None:
    """Caught by the loop of the user, who iterates on with the same consumer."""
    chance = random.Random(seed)
    ensure_journal(conninfo)
    topic = create_topic(bootstrap_servers, 2)
    interrupter = Interrupter()
    consumer = _subscribed(make_consumer, topic)
    for number in range(INTERRUPTS + 1):
        produce(bootstrap_servers, topic, BATCH, 2, start=number * BATCH)
        try:
            if number < INTERRUPTS:
                with interrupter.after(chance.randrange(1, 1200)):
                    _go_on(consumer, effects)
            else:
                drain(consumer)
        except UnitNotFinished as error:
            # Interrupted just between the library and the loop: nobody has the unit. That is said, and it comes again.
            print(error)
    drain(consumer)
    print(len(interrupter.where), "interrupts at", len(set(interrupter.where)), "places")
    verdict = journal.check(conninfo, bootstrap_servers, topic)
    assert verdict.exact, verdict
    assert len(interrupter.where) > INTERRUPTS // 4


def _subscribed(make_consumer: MakeConsumer, topic: str) -> ExactlyOnceConsumer:
    consumer = make_consumer(max_messages=20)
    consumer.subscribe([topic])
    return consumer


def _go_on(consumer: ExactlyOnceConsumer, effects: Callable[[Unit, str], None]) -> None:
    try:
        for unit in consumer.units(idle_seconds=0.15):
            with unit:
                effects(unit, "test")
    except (Interrupt, Redelivered):
        pass


def _consume_for_ever(consumer: ExactlyOnceConsumer, topic: str, interruption: AbstractContextManager[None]) -> None:
    with consumer:
        consumer.subscribe([topic])
        with interruption:
            for unit in consumer:
                with unit:
                    record(unit, "test")


@pytest.mark.fault("D2", more=True)
@pytest.mark.parametrize("seed", seeds([11, 12], new=1))
def test_interrupt_that_ends_the_consumer_loses_and_doubles_nothing(
    seed: int, make_consumer: MakeConsumer, bootstrap_servers: str, conninfo: str
) -> None:
    """As Ctrl-C does it: out of the `with` block, and another consumer goes on."""
    chance = random.Random(seed)
    topic = create_topic(bootstrap_servers, 2)
    ensure_journal(conninfo)
    interrupter = Interrupter()
    for number in range(INTERRUPTS // 6):
        produce(bootstrap_servers, topic, 60, 2, start=number * 60)
        with pytest.raises(Interrupt):
            _consume_for_ever(make_consumer(max_messages=20), topic, interrupter.after(chance.randrange(1, 1500)))
    with make_consumer() as consumer:
        consumer.subscribe([topic])
        drain(consumer)
    verdict = journal.check(conninfo, bootstrap_servers, topic)
    assert verdict.exact, verdict
