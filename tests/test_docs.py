"""Every python block of the README and of docs/*.md runs, in order, one namespace a file."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [p for p in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if p.exists()]
FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str = "python") -> list[tuple[int, str]]:
    """(line number, code) of every fenced block of that language."""
    text = page.read_text()
    return [(text.count("\n", 0, m.start()) + 1, m[2]) for m in FENCE.finditer(text) if m[1] == language]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_code_blocks_run(page):
    module = ModuleType(f"page_{page.stem.replace('-', '_').lower()}")
    sys.modules[module.__name__] = module
    for line, code in blocks(page):
        exec(compile("\n" * line + code, str(page), "exec"), module.__dict__)  # a failing line has its own number
