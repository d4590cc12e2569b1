"""The example that publishes a file, killed with -9 again and again."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from tests.support.journal import scan
from tests.support.topics import create_topic
from tests.support.waiting import until

EXAMPLE = Path(__file__).parents[2] / "examples" / "publish_file.py"
KILLS = int(os.environ.get("EXACTLY_ONCE_PUBLISH_KILLS", "12"))
SEED = int(os.environ.get("EXACTLY_ONCE_SEED", "2026"))
LINES_PER_KILL = 6000
PARTITIONS = 3


def make_file(path: Path, count: int) -> list[bytes]:
    """Write lines of different lengths, each beginning with its own byte offset; return them."""
    rng = random.Random(SEED)
    offset, made = 0, []
    for _ in range(count):
        line = b"%d,%s" % (offset, b"x" * rng.randrange(40))
        made.append(line)
        offset += len(line) + 1
    path.write_bytes(b"\n".join(made) + b"\n")
    return made


def published(admin: AdminClient, topic: str) -> int:
    """How many messages the topic holds."""
    asked = {TopicPartition(topic, n): OffsetSpec.latest() for n in range(PARTITIONS)}  # type: ignore[no-untyped-call]
    return sum(future.result(10).offset for future in admin.list_offsets(asked).values())


def run_with_kills(bootstrap_servers: str, path: Path, topic: str, count: int, *options: str, most: int = KILLS) -> int:
    """Start the example again and again, killing it whenever it has come a little further; return the kills."""
    print("seed", SEED)
    rng = random.Random(SEED)
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    environment = {**os.environ, "EXACTLY_ONCE_BOOTSTRAP_SERVERS": bootstrap_servers}
    command = [sys.executable, str(EXAMPLE), str(path), topic, *options]
    kills = 0
    while True:
        goal = published(admin, topic) + rng.randrange(1, count // most)
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
            if kills < most:
                until(lambda p=process, g=goal: p.poll() is not None or published(admin, topic) >= g, 60, "progress")  # type: ignore[misc]
                process.kill()
            _, errors = process.communicate(timeout=60)
        if process.returncode == 0:
            return kills
        assert process.returncode == -9, errors.decode()
        kills += 1


def test_every_line_is_there_once_however_often_it_was_killed(bootstrap_servers: str, tmp_path: Path) -> None:
    topic = create_topic(bootstrap_servers, PARTITIONS)
    count = KILLS * LINES_PER_KILL
    made = make_file(tmp_path / "lines", count)
    kills = run_with_kills(bootstrap_servers, tmp_path / "lines", topic, count)
    found = Counter(record.value for record in scan(bootstrap_servers, topic))
    lost = [line for line in made if line not in found]
    doubled = [line for line, times in found.items() if times > 1]
    print(f"{len(made)} lines, {kills} kills, {len(lost)} lost, {len(doubled)} doubled")
    assert (lost, doubled) == ([], [])
    assert len(found) == len(made)
    assert kills > KILLS // 2


def test_without_a_filter_lines_are_lost_or_doubled(bootstrap_servers: str, tmp_path: Path) -> None:
    """What the example is there for; this also shows that the test above can fail."""
    topic = create_topic(bootstrap_servers, PARTITIONS)
    kills = 4
    count = kills * LINES_PER_KILL
    made = make_file(tmp_path / "lines", count)
    kills = run_with_kills(bootstrap_servers, tmp_path / "lines", topic, count, "--plain", most=kills)
    found = Counter(record.value for record in scan(bootstrap_servers, topic))
    lost = len(set(made) - set(found))
    doubled = sum(times - 1 for times in found.values())
    print(f"plain: {len(made)} lines, {kills} kills, {lost} lost, {doubled} doubled")
    assert lost + doubled > 0
