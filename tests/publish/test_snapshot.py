"""Snapshots: whole or refused, and a file that is never half written."""

from __future__ import annotations

import errno
from pathlib import Path
from unittest import mock

import pytest

from exactly_once.errors import ConfigurationError
from exactly_once.publish import SnapshotCorrupted, SnapshotFile
from exactly_once.publish.snapshot import pack, unpack


def test_what_is_packed_comes_back() -> None:
    assert unpack("Kind", pack("Kind", {"a": [1, None, "ü"]})) == {"a": [1, None, "ü"]}


def test_another_kind_is_refused() -> None:
    with pytest.raises(SnapshotCorrupted, match="of a Kind"):
        unpack("Other", pack("Kind", {}))


def test_every_cut_and_every_flipped_bit_is_noticed() -> None:
    data = pack("Kind", {"numbers": list(range(20))})
    for n in range(len(data)):
        with pytest.raises(SnapshotCorrupted):
            unpack("Kind", data[:n])
        for bit in range(8):
            with pytest.raises(SnapshotCorrupted):
                unpack("Kind", data[:n] + bytes([data[n] ^ (1 << bit)]) + data[n + 1 :])
    with pytest.raises(SnapshotCorrupted):
        unpack("Kind", data + b"x")


def test_a_file_that_is_not_there_was_never_written(tmp_path: Path) -> None:
    assert SnapshotFile(tmp_path / "none").load() is None


def test_a_directory_that_is_not_there_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"no directory {tmp_path}/missing"):
        SnapshotFile(tmp_path / "missing" / "snapshot")


def test_a_directory_that_is_gone_is_named_when_the_next_snapshot_is_made(tmp_path: Path) -> None:
    """As of a volume that was unmounted while the producer runs."""
    directory = tmp_path / "volume"
    directory.mkdir()
    file = SnapshotFile(directory / "snapshot")
    directory.rmdir()
    with pytest.raises(ConfigurationError, match=rf"snapshots in .*: there is no directory {directory}\. Make it"):
        file.save(b"one")
    directory.mkdir()
    file.save(b"one")
    assert file.load() == b"one"


def test_the_last_snapshot_is_what_is_there(tmp_path: Path) -> None:
    file = SnapshotFile(tmp_path / "snapshot")
    file.save(b"one")
    file.save(b"two")
    assert file.load() == b"two"
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot"]


def test_a_failing_write_leaves_the_last_snapshot_whole(tmp_path: Path) -> None:
    """A mock: there is no portable way to have fsync fail on a real disk."""
    file = SnapshotFile(tmp_path / "snapshot")
    file.save(b"one")
    full = OSError(errno.ENOSPC, "no space")
    with mock.patch("os.fsync", side_effect=full), pytest.raises(OSError, match=f"no space: '{tmp_path}/.snapshot-"):
        file.save(b"two")
    assert file.load() == b"one"
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot"]
