"""By batch: single keys for filters whose every change is one statement over several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from .keys import GivenKey
from .protocol import State


class ByBatch(ABC):
    """The single forms of a filter, out of its batch forms."""

    def reserve(self, key: GivenKey) -> State:
        """Ask for the right to send ``key``."""
        return self.reserve_many((key,))[0]

    def confirm(self, key: GivenKey) -> None:
        """Settle: the message is in the log."""
        self.confirm_many((key,))

    def release(self, key: GivenKey) -> None:
        """Settle: the message is surely not in the log."""
        self.release_many((key,))

    def mark_unknown(self, key: GivenKey) -> None:
        """Settle: nobody knows whether the message is in the log."""
        self.mark_unknown_many((key,))

    @abstractmethod
    def reserve_many(self, keys: Iterable[GivenKey]) -> list[State]:
        """Reserve several keys."""

    @abstractmethod
    def confirm_many(self, keys: Iterable[GivenKey]) -> None:
        """Confirm several keys."""

    @abstractmethod
    def release_many(self, keys: Iterable[GivenKey]) -> None:
        """Forget several keys."""

    @abstractmethod
    def mark_unknown_many(self, keys: Iterable[GivenKey]) -> None:
        """Doubt several keys."""
