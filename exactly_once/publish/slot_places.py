"""Where shared slots are: memcached."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from exactly_once.errors import ConfigurationError

from .errors import FilterUnavailable
from .shared_slots import Slot

if TYPE_CHECKING:
    from pymemcache.client.base import Client  # type: ignore[import-untyped]

_ABSENT = object()
_EMPTY = b"-"
"""What a forgotten slot holds in memcached, as in the original: a delete could not be compared."""


class MemcachedSlots:
    """Slots in memcached: ``MemcachedSlots(("127.0.0.1", 11211), prefix="orders")``. Needs pymemcache.

    Memcached drops what it has no room for, everything when it restarts, and a reservation after ``lease_seconds``,
    which must be longer than a message may be in flight: duplicates may pass then.
    """

    def __init__(
        self, server: tuple[str, int], *, prefix: str, lease_seconds: int = 600, timeout_seconds: float = 3.0
    ) -> None:
        try:
            from pymemcache.client.base import Client  # noqa: PLC0415 - only who uses it needs it
            from pymemcache.exceptions import MemcacheError  # type: ignore[import-untyped]  # noqa: PLC0415
        except ImportError:
            raise ConfigurationError("pymemcache is missing: pip install 'kafka-exactly-once[memcached]'") from None
        self._errors = (MemcacheError, OSError)
        self._client: Client = Client(
            server, connect_timeout=timeout_seconds, timeout=timeout_seconds, no_delay=True, default_noreply=False
        )
        self._prefix = prefix
        self._lease_seconds = lease_seconds
        self._lock = threading.Lock()

    def read(self, slots: list[int]) -> dict[int, tuple[Slot | None, object]]:
        """Return what the slots hold, each with memcached's own mark of the change."""
        names = {self._name(slot): slot for slot in slots}
        found = self._ask("gets_many", list(names))
        answers: dict[int, tuple[Slot | None, object]] = {}
        for name, slot in names.items():
            value, mark = found.get(name, (None, _ABSENT))
            held = None if value is None or value == _EMPTY else Slot(value[:16], value[16:17], value[17:])
            answers[slot] = (held, mark)
        return answers

    def swap(self, slot: int, proof: object, new: Slot | None) -> bool:
        """Put something else into a slot if it is unchanged."""
        value = _EMPTY if new is None else new.digest + new.state + new.owner
        expire = self._lease_seconds if new is not None and new.state in (b"f", b"t") else 0
        if proof is _ABSENT:
            return bool(self._ask("add", self._name(slot), value, expire))
        # None means that memcached has dropped the slot meanwhile: read it again.
        return bool(self._ask("cas", self._name(slot), value, proof, expire))

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._client.close()

    def _name(self, slot: int) -> str:
        return f"{self._prefix}:{slot}"

    def _ask(self, command: str, *arguments: Any) -> Any:
        with self._lock:
            try:
                return getattr(self._client, command)(*arguments)
            except self._errors as error:
                self._client.close()
                raise FilterUnavailable(f"memcached cannot be asked: {error}") from error
