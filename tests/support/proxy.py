"""The fault proxy, which the soak uses as well."""

from __future__ import annotations

from exactly_once.embedded.proxy import ADVANCE_AND_COMMIT, COMMIT, Fault, PostgresProxy

__all__ = ["ADVANCE_AND_COMMIT", "COMMIT", "Fault", "PostgresProxy"]
