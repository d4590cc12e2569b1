"""Redaction: texts without what looks like, or is known to be, a password. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterable

HIDDEN = "***"
_SHOWN = (
    (re.compile(r"(\w+://[^\s:/@]*:)\S*@"), rf"\1{HIDDEN}@"),
    (
        re.compile(
            r"((?:password|passphrase|secret)[\w.]*\s*[=:]\s*)('(?:[^'\\]|\\.)*'|\"[^\"]*\"|[^\s,;)]+)", re.IGNORECASE
        ),
        rf"\1{HIDDEN}",
    ),
    # An "@" or "/" in a password that should have been written %40 or %2F makes a part of it the name of a host or a
    # database, or the number of a port, which drivers repeat.
    (re.compile(r"(['\"])[^'\"\s]*@"), rf"\1{HIDDEN}@"),
    (re.compile(r"(invalid (?:port number:|integer value) ['\"])[^'\"]*"), rf"\1{HIDDEN}"),
)


def without_secrets(text: str, secrets: Iterable[str] = ()) -> str:
    """Hide what is known to be secret, and what looks like the password of a connection string."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    for pattern, shown in _SHOWN:
        text = pattern.sub(shown, text)
    return text
