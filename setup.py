"""The README as a package index shows it, which knows no files of the repository; all else is in pyproject.toml.

Links and pictures of README.md are relative. With a Repository in [project.urls] they become absolute, and SVG pictures
become the PNGs beside them; without one, links become their words, and pictures are left out.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://)([^)\s]+)\)")


def absolute(text: str, repository: str) -> str:
    def link(match: re.Match[str]) -> str:
        picture, words, to = match.groups()
        if not repository:
            return "" if picture else words
        if picture:
            return f"![{words}]({repository}/raw/main/{to.removesuffix('.svg')}.png)"
        return f"[{words}]({repository}/blob/main/{to})"

    return LINK.sub(link, text)


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    setup(
        long_description=absolute((ROOT / "README.md").read_text(), project.get("urls", {}).get("Repository", "")),
        long_description_content_type="text/markdown",
    )
