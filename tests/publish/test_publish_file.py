"""The example that publishes a file, killed with -9 again and again."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from exactly_once.demo.journal import scan
from tests.support.seeds import seeds
from tests.support.topics import create_topic

EXAMPLE = Path(__file__).parents[2] / "examples" / "publish_file.py"
KILLS = int(os.environ.get("EXACTLY_ONCE_PUBLISH_KILLS", "6"))
LINES_PER_KILL = 6000
PARTITIONS = 3
MOST_SECONDS = 0.02
"""A process lives so long at most after the line at which it was to die: a few hundred lines further."""


def make_file(path: Path, count: int, rng: random.Random) -> list[bytes]:
    """Write lines of different lengths, each beginning with its own byte offset; return them."""
    offset, made = 0, []
    for _ in range(count):
        line = b"%d,%s" % (offset, b"x" * rng.randrange(40))
        made.append(line)
        offset += len(line) + 1
    path.write_bytes(b"\n".join(made) + b"\n")
    return made


DIES_AT_A_LINE = """
import os, runpy, sys, threading, time
from exactly_once.publish import DedupProducer
line, seconds, sys.argv = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
produced = 0
def produce(self, *args, real=DedupProducer.produce, **options):
    global produced
    produced += 1
    if produced == line:
        threading.Timer(seconds, os.kill, (os.getpid(), 9)).start()
    elif line and produced == line + 2000:
        time.sleep(60)
    return real(self, *args, **options)
DedupProducer.produce = produce
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Kills itself some time after a line: from outside, it would have ended first on a busy machine.

So it might if the timer is late: 2,000 lines further it waits for that.
"""
DIES_BEFORE_A_NOTE = """
import os, pathlib, runpy, sys
after, sys.argv = int(sys.argv[1]), sys.argv[2:]
notes = 0
def write_text(self, *args, write=pathlib.Path.write_text):
    global notes
    notes += 1
    if notes > after:
        os.kill(os.getpid(), 9)
    return write(self, *args)
pathlib.Path.write_text = write_text
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def execute(bootstrap_servers: str, *arguments: str, program: str = DIES_AT_A_LINE) -> subprocess.CompletedProcess[str]:
    """Run one of these programs."""
    environment = {**os.environ, "EXACTLY_ONCE_BOOTSTRAP_SERVERS": bootstrap_servers}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)


def run(bootstrap_servers: str, program: str, *arguments: str, status: int) -> None:
    """Run one of these programs; it must end as expected."""
    done = execute(bootstrap_servers, *arguments, program=program)
    assert done.returncode == status, done.stderr


@pytest.mark.parametrize("seed", seeds([2026], new=1))
def test_every_line_is_there_once_however_often_it_was_killed(
    seed: int, bootstrap_servers: str, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    topic = create_topic(bootstrap_servers, PARTITIONS)
    made = make_file(tmp_path / "lines", KILLS * LINES_PER_KILL, rng)
    arguments = [str(EXAMPLE), str(tmp_path / "lines"), topic]
    for _ in range(KILLS):
        line, seconds = rng.randrange(1, LINES_PER_KILL // 2), rng.random() * MOST_SECONDS
        run(bootstrap_servers, DIES_AT_A_LINE, str(line), str(seconds), *arguments, status=-9)
    run(bootstrap_servers, DIES_AT_A_LINE, "0", "0", *arguments, status=0)
    found = Counter(record.value for record in scan(bootstrap_servers, topic))
    lost = [line for line in made if line not in found]
    doubled = [line for line, times in found.items() if times > 1]
    assert (lost, doubled) == ([], [])
    assert len(found) == len(made)


def test_a_line_that_the_broker_refuses_is_told(bootstrap_servers: str, tmp_path: Path) -> None:
    topic = create_topic(bootstrap_servers, 1, max_message_bytes="1000")
    (tmp_path / "lines").write_bytes(b"0\n" + b"x" * 5000 + b"\n2\n")
    for _ in range(2):
        done = execute(bootstrap_servers, "0", "0", str(EXAMPLE), str(tmp_path / "lines"), topic)
        assert done.returncode == 1
        assert "not up to the last one at 5003" in done.stderr


def test_a_file_or_a_topic_that_is_not_there_is_told_in_a_line(
    bootstrap_servers: str, tmp_path: Path, name: str
) -> None:
    made = tmp_path / "lines"
    make_file(made, 3, random.Random(1))
    for path, topic, told in (
        (tmp_path / "none", create_topic(bootstrap_servers, 1), "FileNotFoundError: "),
        (made, name, f"there is no topic {name!r}"),
    ):
        done = execute(bootstrap_servers, "0", "0", str(EXAMPLE), str(path), topic)
        assert done.returncode == 1
        assert told in done.stderr
        assert "Traceback" not in done.stderr


def test_files_of_one_name_are_two_files(bootstrap_servers: str, tmp_path: Path) -> None:
    topic = create_topic(bootstrap_servers, 1)
    for day in ("first", "second"):
        (tmp_path / day).mkdir()
        (tmp_path / day / "orders.csv").write_bytes(b"header\n" + day.encode() + b"\n")
        (tmp_path / day / "orders.json").write_bytes(b"header\n" + day.encode() + b"\n")
    for _ in range(2):
        for path in sorted(tmp_path.glob("*/orders.*")):
            run(bootstrap_servers, DIES_AT_A_LINE, "0", "0", str(EXAMPLE), str(path), topic, status=0)
    found = Counter(record.value for record in scan(bootstrap_servers, topic))
    assert found == {b"header": 4, b"first": 2, b"second": 2}


def test_a_file_is_the_same_by_a_link_of_another_name(bootstrap_servers: str, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    file, link = tmp_path / "data.csv", tmp_path / "links" / "today.csv"
    make_file(file, 3, random.Random(1))
    link.symlink_to(file)
    topic = create_topic(bootstrap_servers, PARTITIONS)
    for path in (link, file, link):
        run(bootstrap_servers, DIES_AT_A_LINE, "0", "0", str(EXAMPLE), str(path), topic, status=0)
    assert len(scan(bootstrap_servers, topic)) == 3


def test_another_file_under_a_name_is_refused(bootstrap_servers: str, tmp_path: Path) -> None:
    """As where it was cut off, or written anew; in place, with lines as long, with the same first line or another."""
    topic = create_topic(bootstrap_servers, 1)
    path = tmp_path / "lines"
    contents = [b"0\n23\n56\n", b"0\n2\n", b"0\n23456\n89\n", b"0\n24\n56\n", b"0\n24\n57\n89\n", b"0\n2345678\n", b""]
    contents.append(b"1\n23\n56\n")
    for arguments in ([str(EXAMPLE), str(path), topic, "--name", "n"], [str(EXAMPLE), str(path), topic]):
        for number, content in enumerate(contents):
            path.write_bytes(content)
            done = execute(bootstrap_servers, "0", "0", *arguments)
            assert done.returncode == (number > 0), done.stderr
            assert number == 0 or done.returncode == 0 or "is not the file any more" in done.stderr
        path.with_name("lines").write_bytes(contents[0])
    found = [record.value for record in scan(bootstrap_servers, topic)]
    assert found == [b"0", b"23", b"56"] * 2


def test_a_line_that_is_still_written_is_left_for_the_next_time(bootstrap_servers: str, tmp_path: Path) -> None:
    topic = create_topic(bootstrap_servers, 1)
    path = tmp_path / "lines"
    for content in (b"o", b"on", b"one\ntwo\nthr", b"one\ntwo\nthree\n", b"one\ntwo\nthree\nfour\n"):
        path.write_bytes(content)
        run(bootstrap_servers, DIES_AT_A_LINE, "0", "0", str(EXAMPLE), str(path), topic, status=0)
    assert [record.value for record in scan(bootstrap_servers, topic)] == [b"one", b"two", b"three", b"four"]


def test_without_a_filter_a_kill_doubles_lines(bootstrap_servers: str, tmp_path: Path) -> None:
    """What the example is there for: it is killed when a report has come and is not noted.

    This also shows that the test above can fail.
    """
    topic = create_topic(bootstrap_servers, PARTITIONS)
    made = make_file(tmp_path / "lines", 500, random.Random(2026))
    for after, status in ((100, -9), (len(made), 0)):
        arguments = [str(EXAMPLE), str(tmp_path / "lines"), topic, "--plain"]
        run(bootstrap_servers, DIES_BEFORE_A_NOTE, str(after), *arguments, status=status)
    found = Counter(record.value for record in scan(bootstrap_servers, topic))
    assert [line for line, times in found.items() if times > 1]
