"""What the site has besides the pages in docs/: the README and its neighbours, and the commands from their parsers."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout, suppress
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from exactly_once.cli import COMMANDS, main

ROOT = Path(__file__).parent.parent
FROM_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "docker/README.md": "docker.md",
}
"""Files outside docs/, and the pages that they become."""
_LINK = re.compile(r"\[([^\]\[]+)\]\(([^)#:]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    for name, page in FROM_ROOT.items():
        files.append(File.generated(config, page, content=_relinked((ROOT / name).read_text("utf-8"), name)))
    files.append(File.generated(config, "reference/commands.md", content=commands()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links of pages in docs/ at what the site has."""
    if page.file.generated_by:
        return markdown
    return _relinked(markdown, f"docs/{page.file.src_uri}")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leave out the roles that docstrings have for Sphinx."""
    return re.sub(r":(?:attr|class|data|func|meth|mod):(?=<code>)", "", html)


def commands() -> str:
    """Return the page with the help of every command."""
    parts = ["# Commands\n"]
    for name in ("", *COMMANDS):
        text = io.StringIO()
        with redirect_stdout(text), suppress(SystemExit):
            main([*name.split(), "--help"])
        parts.append(f"## exactly-once {name}".rstrip() + f"\n\n```text\n{text.getvalue().rstrip()}\n```\n")
    return "\n".join(parts)


def _relinked(markdown: str, source: str) -> str:
    """Make links relative to a file of the repository links of the site; what it does not have becomes a plain name."""
    here = (ROOT / source).parent
    page = ROOT / "docs" / FROM_ROOT.get(source, source.removeprefix("docs/"))

    def relinked(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = Path(*_normal(here / target))
        name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else ""
        if name in FROM_ROOT:
            path = ROOT / "docs" / FROM_ROOT[name]
        elif not name.startswith("docs/") or not path.is_file():
            return text if text.startswith("`") else f"{text} (`{name}`)" if name and name != text else f"`{text}`"
        up = [".."] * len(page.parent.relative_to(ROOT / "docs").parts)
        return f"[{text}]({'/'.join([*up, *path.relative_to(ROOT / 'docs').parts])}{anchor})"

    return _LINK.sub(relinked, markdown)


def _normal(path: Path) -> list[str]:
    parts: list[str] = []
    for part in path.parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return parts
