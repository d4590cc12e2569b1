"""Snapshots: a filter's state as bytes that cannot be loaded by halves, and files that hold them."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from exactly_once.errors import ConfigurationError

from .errors import SnapshotCorrupted

_NAME = b"exactly-once snapshot "
# The number is raised whenever the content of any kind of snapshot changes: whoever loads one trusts what is in it.
_MAGIC = _NAME + b"2\n"
_DIGEST_BYTES = 16


class SnapshotStore(Protocol):
    """Where snapshots are kept: the last one is all that is needed."""

    def load(self) -> bytes | None:
        """Return the last snapshot, or None if there never was one."""
        ...

    def save(self, data: bytes) -> None:
        """Put a snapshot in the place of the last one: after a crash one of the two is there, whole."""
        ...


class SnapshotFile:
    """Keeps snapshots in a file.

    :raises ConfigurationError: when its directory does not exist.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._check_directory()

    def __repr__(self) -> str:
        return f"SnapshotFile({str(self._path)!r})"

    def load(self) -> bytes | None:
        """Return what the file holds, or None if there is no file."""
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return None

    def save(self, data: bytes) -> None:
        """Write beside the file, sync, and rename over it.

        :raises ConfigurationError: when its directory is gone.
        """
        self._check_directory()
        handle, name = tempfile.mkstemp(prefix=f".{self._path.name}-", dir=self._path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(self._path)
        except BaseException as error:
            with contextlib.suppress(FileNotFoundError):
                Path(name).unlink()
            if isinstance(error, OSError) and error.errno is not None and error.filename is None:
                error.filename = name  # a full disk does not say where it is
            raise
        directory = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _check_directory(self) -> None:
        if not self._path.parent.is_dir():
            raise ConfigurationError(f"snapshots in {self._path}: there is no directory {self._path.parent}. Make it")


def pack(kind: str, content: dict[str, Any]) -> bytes:
    """Return ``content`` as bytes that carry their kind and a digest."""
    body = json.dumps({"kind": kind, "content": content}, separators=(",", ":")).encode()
    return _MAGIC + _digest(body) + body


def unpack(kind: str, data: bytes) -> dict[str, Any]:
    """Return the content of a snapshot.

    :raises SnapshotCorrupted: when it is cut short, altered, of another kind or no snapshot at all.
    """
    if data.startswith(_NAME) and b"\n" in data[: len(_MAGIC) + 2] and not data.startswith(_MAGIC):
        raise SnapshotCorrupted("the snapshot is one of another version of this library")
    if not data.startswith(_MAGIC):
        raise SnapshotCorrupted("this is no snapshot of this library, or one cut short at its very start")
    digest, body = data[len(_MAGIC) :][:_DIGEST_BYTES], data[len(_MAGIC) + _DIGEST_BYTES :]
    if _digest(body) != digest:
        raise SnapshotCorrupted(f"the snapshot of {len(data)} bytes was cut short or altered; its digest differs")
    document = json.loads(body)
    if document["kind"] != kind:
        raise SnapshotCorrupted(f"the snapshot is one of a {document['kind']}, not of a {kind}")
    content: dict[str, Any] = document["content"]
    return content


def _digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=_DIGEST_BYTES).digest()
