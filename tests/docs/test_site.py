"""The documentation as a site: it builds without a network and without a warning, and has every page and option."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from exactly_once import ExactlyOnceConsumer
from exactly_once.cli import COMMANDS
from tests.support.findings import nothing

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)],
        cwd=ROOT,
        env={**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (built.returncode, built.stdout + built.stderr) == (0, "")
    return out


def test_every_page_is_in_the_site(site: Path) -> None:
    pages = [page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")]
    nothing((page for page in pages if not (site / page).exists()), "not in the site")


def test_every_page_is_in_the_navigation() -> None:
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]
    nothing((page for page in pages if f": {page}\n" not in navigation), "not in the navigation of mkdocs.yml")


def test_the_reference_has_every_option_and_every_command(site: Path) -> None:
    consumer = (site / "reference" / "consumer.html").read_text("utf-8")
    options = list(inspect.signature(ExactlyOnceConsumer).parameters)
    nothing((name for name in options if name not in consumer), "an option that the reference lacks")
    commands = (site / "reference" / "commands.html").read_text("utf-8")
    nothing((name for name in COMMANDS if f"exactly-once {name}" not in commands), "a command that the reference lacks")
