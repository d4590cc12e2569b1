"""Property tests: any series of changes, against a plain dict of states as the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from exactly_once.publish import Filter, State
from tests.publish.subjects import IN_MEMORY, Subject

NEW, IN_FLIGHT, UNKNOWN, DUPLICATE = State.NEW, State.IN_FLIGHT, State.UNKNOWN, State.DUPLICATE
KEYS = st.integers(0, 12)


class Model(RuleBasedStateMachine):
    """Keys by number. ``rises`` holds where a key may only be used first after all lower ones."""

    subject: ClassVar[Subject]
    rises: ClassVar[bool]

    def __init__(self) -> None:
        super().__init__()
        self.made: Filter[Any] = self.subject.make()
        self.states: dict[int, str] = {}
        self.duplicates = 0

    def allowed(self, n: int) -> int:
        """Map a key to one that may be used now."""
        return min(n, len(self.states)) if self.rises else n

    def expected(self, n: int) -> State:
        state = self.states.get(n, "absent")
        if state == "absent":
            self.states[n] = "clean"
            return NEW
        if state == "unknown":
            self.states[n] = "tainted"
            return UNKNOWN
        self.duplicates += state == "confirmed"
        return DUPLICATE if state == "confirmed" else IN_FLIGHT

    @rule(n=KEYS)
    def reserve(self, n: int) -> None:
        n = self.allowed(n)
        assert self.made.reserve(self.subject.key(n)) is self.expected(n)

    @rule(ns=st.lists(KEYS, max_size=8))
    def reserve_many(self, ns: list[int]) -> None:
        ns = [self.allowed(n) for n in ns]
        got = self.made.reserve_many([self.subject.key(n) for n in ns])
        assert got == [self.expected(n) for n in ns]

    @rule(ns=st.lists(KEYS, max_size=4), one=st.booleans())
    def confirm(self, ns: list[int], *, one: bool) -> None:
        ns = [n for n in ns if n in self.states]
        self.apply(self.made.confirm, self.made.confirm_many, ns, one=one)
        self.states.update(dict.fromkeys(ns, "confirmed"))

    # Each key once: of one that is given twice, a statement over all of them releases one.
    @rule(ns=st.lists(KEYS, max_size=4, unique=True), one=st.booleans())
    def release(self, ns: list[int], *, one: bool) -> None:
        ns = [n for n in ns if n in self.states]
        self.apply(self.made.release, self.made.release_many, ns, one=one)
        after = {"confirmed": "confirmed", "tainted": "unknown"}
        for n in ns:
            self.states[n] = after.get(self.states[n], "absent")

    @rule(ns=st.lists(KEYS, max_size=4), one=st.booleans())
    def mark_unknown(self, ns: list[int], *, one: bool) -> None:
        ns = [n for n in ns if n in self.states]
        self.apply(self.made.mark_unknown, self.made.mark_unknown_many, ns, one=one)
        for n in ns:
            if self.states[n] in ("clean", "tainted"):
                self.states[n] = "unknown"

    def apply(self, single: Callable[[Any], None], many: Callable[[Any], None], ns: list[int], *, one: bool) -> None:
        keys = [self.subject.key(n) for n in ns]
        if one:
            for key in keys:
                single(key)
        else:
            many(keys)

    @invariant()
    def stats_agree(self) -> None:
        stats, states = self.made.stats(), list(self.states.values())
        assert stats.in_flight == states.count("clean") + states.count("tainted")
        assert stats.unknown == states.count("unknown")
        assert stats.duplicates == self.duplicates


@pytest.mark.parametrize("name", IN_MEMORY)
def test_any_series_of_changes_equals_the_model(name: str) -> None:
    # A number of a sequence, or of a chain without references, may not be used first after a higher one.
    check(IN_MEMORY[name], rises="sequence" in name or "without" in name, examples=60)


@pytest.mark.postgres
@pytest.mark.parametrize("fixture", ["postgres_window", "sharded_window", "memcached_slots", "postgres_chain"])
def test_any_series_of_changes_on_a_server_equals_the_model(fixture: str, request: pytest.FixtureRequest) -> None:
    check(request.getfixturevalue(fixture), rises=False, examples=15)


def check(subject: Subject, *, rises: bool, examples: int) -> None:
    machine = type("Machine", (Model,), {"subject": subject, "rises": rises})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=30))
