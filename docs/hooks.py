"""Hooks of the site (mkdocs.yml): files of the repository that pages link to become pages of the site.

On a code host a link to ../../examples/generate.py shows the file. The site shows it too, as repository/examples/...
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".sh": "bash", ".slurm": "bash"}

SIGNATURE = re.compile(r"<!-- ::: ([\w.]+)((?: \w+)*) -->\n### ([\w.]+)\n.*?<!-- end -->", re.DOTALL)
SEARCHED = "repository/README.md", "repository/CONTRIBUTING.md"
MEASURED = "reference/figures", "explanation/log"  # of use to few who search
# of use to most
GUIDES = *SEARCHED, "how-to/", "reference/attention", "reference/api", "explanation/over-ranks", "troubleshooting"


def name_of(path: str) -> str:
    """The page of a file of the repository, from the root of docs/."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def relinked(text: str, source: str, page: str, found: Callable[[str], Any] = lambda path: None) -> str:
    """A page's text with its links, which are relative to `source`, made relative to `page` of docs/."""

    def link(match: re.Match[str]) -> str:
        to, anchor = match[1], match[2] or ""
        path = os.path.normpath(os.path.join(os.path.dirname(source), to))
        if "://" in to or to.startswith("mailto:") or not (ROOT / path).is_file():
            return match[0]
        if not path.startswith("docs/"):
            found(path)
        return f"]({os.path.relpath(name_of(path), os.path.dirname(page) or '.')}{anchor})"

    return LINK.sub(link, text)


def page_of(path: str, found: Callable[[str], Any]) -> str:
    """The page that shows a file of the repository."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return relinked(text, path, name_of(path), found)
    return f"# {path}\n\n````{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}\n````\n"


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every file outside of docs/ that a page links to, and for those that these link to."""
    wanted: list[str] = []
    for file in files.documentation_pages():
        relinked(file.content_string, f"docs/{file.src_uri}", file.src_uri, wanted.append)
    done = set[str]()
    while wanted:
        path = wanted.pop()
        if path not in done:
            done.add(path)
            files.append(File.generated(config, name_of(path), content=page_of(path, wanted.append)))
    return files


def described(match: re.Match[str]) -> str:
    """mkdocstrings' description of an object in place of the signature that code hosts show."""
    members = ", ".join(match[2].split())
    return f"::: {match[1]}\n    options: {{heading: {match[3]}, members: {f'[{members}]' if members else 'false'}}}\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    uri = page.file.src_uri
    if uri.startswith("repository/") and uri not in SEARCHED:
        page.meta["search"] = {"exclude": True}  # source, and the changelog, which names everything
    elif uri.startswith(MEASURED):
        page.meta["search"] = {"boost": 0.2}
    elif uri.startswith(GUIDES):
        page.meta["search"] = {"boost": 4}
    markdown = SIGNATURE.sub(described, markdown)
    return markdown if uri.startswith("repository/") else relinked(markdown, f"docs/{uri}", uri)
