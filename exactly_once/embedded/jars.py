"""The jars of Apache Kafka and others: fetched once by their Maven coordinates, then kept in the user's cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import pwd
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import tenacity

from .errors import DownloadError, EmbeddedError, package_directory

KAFKA_VERSION = "4.3.0"
_COORDINATES = f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}+org.slf4j:slf4j-simple:1.7.36"
# What mends a download that the network does not let through: requests fetches jars, pip fetches Java.
MEND = "HTTPS_PROXY names a proxy; REQUESTS_CA_BUNDLE and SSL_CERT_FILE name the file with its certificates"
_log = logging.getLogger(__name__)


def kafka_home() -> Path:
    """Return the directory with Kafka's jars, fetching them the first time; see `fetched`."""
    return fetched(_COORDINATES, f"kafka-{KAFKA_VERSION}", f"Apache Kafka {KAFKA_VERSION}")


def fetched(coordinates: str, name: str, title: str) -> Path:
    """Return the cache's directory *name* with the jars of *coordinates*, fetching them the first time.

    Raises `DownloadError` if they cannot be had, `MissingExtra` if the resolver is not installed.
    """
    home = cache_directory() / name
    if home.is_dir():
        return home
    with locked(home):
        if home.is_dir():  # by another process, meanwhile
            return home
        package_directory("jgo")
        # Of the jars that the tests ran with.
        lines = Path(__file__).with_name("jars.sha256").read_text().splitlines()
        known = {name: digest for digest, name in map(str.split, lines)}
        with Progress(f"{title}: fetching its jars, once") as progress:
            try:
                for attempt in tenacity.Retrying(
                    stop=tenacity.stop_after_attempt(3), wait=tenacity.wait_fixed(1), reraise=True
                ):
                    # A fresh directory for each attempt and one rename at the end: a broken download is never taken
                    # for a jar. It is not the user's Maven repository: POMs without their jars, left there, break
                    # other resolvers.
                    with attempt, tempfile.TemporaryDirectory(dir=home.parent, prefix="fetching-") as temporary:
                        complete = Path(temporary, "complete")
                        complete.mkdir()
                        for jar in _resolve(coordinates, Path(temporary), progress):
                            if jar.name not in known:
                                _log.warning("no digest of %s is known: it is what the repository has there", jar.name)
                            elif hashlib.sha256(jar.read_bytes()).hexdigest() != known[jar.name]:
                                raise DownloadError(
                                    f"{jar.name} is not what it was when this was released: its SHA-256 is another one"
                                )
                            shutil.move(jar.resolve(), complete / jar.name)
                        complete.rename(home)
            except Exception as error:
                mend = "" if isinstance(error, DownloadError) else f" ({MEND})"
                raise DownloadError(f"the jars of {title} could not be fetched: {error}{mend}") from error
    return home


def classpath() -> str:
    """Return the class path of a broker, in an order that never changes."""
    return os.pathsep.join(str(jar) for jar in sorted(kafka_home().glob("*.jar")))


def cache_directory() -> Path:
    """Return this project's part of the user's cache; it need not exist."""
    if not (cache := os.environ.get("XDG_CACHE_HOME")):
        try:
            # Not Path.home(): it takes an empty HOME for the root directory.
            home = os.environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:  # a number that a container was given, without a name
            raise EmbeddedError(
                "HOME is not set, and this user has no home directory; XDG_CACHE_HOME names a place for the cache"
            ) from None
        cache = str(Path(home, ".cache"))
    return Path(cache, "kafka-exactly-once")


def make_writable(directory: Path) -> None:
    """Make a directory of the cache; raise `EmbeddedError` where nothing can be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()  # a directory that is there says nothing of that
    except OSError as error:
        raise EmbeddedError(
            f"the cache {directory} cannot be written ({error.strerror}); XDG_CACHE_HOME names another place for it"
        ) from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes from making *path*, in the cache, at the same time."""
    make_writable(path.parent)
    with path.with_name(path.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _resolve(coordinates: str, directory: Path, progress: Progress) -> list[Path]:
    from jgo.env import EnvironmentBuilder, LinkStrategy  # noqa: PLC0415  (an extra brings it)
    from jgo.maven import MavenContext, PythonResolver  # noqa: PLC0415

    context = MavenContext(
        resolver=PythonResolver(progress_callback=progress.file),
        repo_cache=directory / "maven",
        timeout=30,  # seconds for one answer; the jars are large, the connection is not always good
    )
    builder = EnvironmentBuilder(context, cache_dir=directory / "jgo", link_strategy=LinkStrategy.COPY)
    return list(builder.from_endpoint(coordinates).all_jars)


class Progress:
    """Show a long step on standard error: a live line on a terminal, plain lines otherwise."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._jars = 0
        self._bytes = 0
        self._is_live = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        self._show("" if self._is_live else "\n")
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._is_live:
            self._show("\n")
        elif error is None:
            self._show(" done\n")

    @contextlib.contextmanager
    def file(self, name: str, size: int) -> Iterator[Callable[[int], None]]:
        """Count one file; the function that this yields takes its bytes."""
        _log.debug("fetching %s, %d bytes", name, size)

        def add(count: int) -> None:
            before = self._bytes
            self._bytes += count
            # A line for each megabyte is often enough for the eye.
            if self._is_live and before >> 20 != self._bytes >> 20:
                self._show("")

        yield add
        self._jars += name.endswith(".jar")

    def _show(self, end: str) -> None:
        start = "\r" if self._is_live else ""
        amount = f": {self._jars} jars, {self._bytes >> 20} MB" if self._jars else ""
        print(f"{start}{self._title}{amount}", end=end, file=sys.stderr, flush=True)
