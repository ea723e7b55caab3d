"""Every python block of the README and of docs/ runs, in order, one namespace a file; every picture is there.

A block whose first line is `# torchrun ... NAME.py` is a script: it runs on the ranks that these words ask for.
"""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from torch.distributed.run import get_args_parser

from tests.launched import launched

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]*))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def shapes_of(svg: str) -> tuple[np.ndarray, str]:
    """The coordinates in a picture's paths, in order, and the version of matplotlib that drew it."""
    paths = re.findall(r' d="([^"]*)"', svg)
    return np.array([float(n) for path in paths for n in re.findall(r"-?\d+\.?\d*", path)]), re.findall(
        "Matplotlib v[0-9.]+", svg
    )[0]


def anchors(page: Path) -> list[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in HEADING.findall(page.read_text())]


def blocks(page: Path) -> list[tuple[int, str]]:
    """(line number, code) of every fenced python block."""
    text = page.read_text()
    return [(text.count("\n", 0, m.start()) + 1, m[1]) for m in FENCE.finditer(text)]


def command_of(code: str) -> list[str] | None:
    """The words of the comment that says how to start a script; None for a block that is no script."""
    first = code.split("\n", 1)[0]
    return shlex.split(first[2:]) if first.startswith("# torchrun ") else None


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_code_blocks_run(page):
    module = ModuleType(f"page_{page.stem.replace('-', '_').lower()}")
    for line, code in blocks(page):
        if command_of(code) is None:
            exec(compile("\n" * line + code, str(page), "exec"), module.__dict__)  # errors name the page's own lines


SCRIPTS = [(page, line, code) for page in PAGES for line, code in blocks(page) if command_of(code)]


@pytest.mark.slow
@pytest.mark.parametrize("page, line, code", SCRIPTS, ids=[f"{p.name}:{n}" for p, n, _ in SCRIPTS])
def test_scripts_for_torchrun_run(page, line, code, tmp_path):
    asked = get_args_parser().parse_args(command_of(code)[1:])
    (tmp_path / asked.training_script).write_text(code)
    ranks = int(asked.nproc_per_node)
    printed = launched(tmp_path / asked.training_script, asked.training_script_args, ranks, tmp_path)
    assert [f"rank {rank}: " in printed for rank in range(ranks)] == [True] * ranks, printed


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    links = [
        (page.parent / to if to else page, anchor) for to, anchor in LINK.findall(page.read_text()) if "://" not in to
    ]
    missing = [str(to) for to, anchor in links if not to.exists() or (anchor and anchor not in anchors(to))]
    assert not missing, f"{page.name} links to {missing}"


@pytest.mark.slow
def test_every_picture_can_be_drawn_and_is_shown(tmp_path):
    pytest.importorskip("matplotlib")
    subprocess.run([sys.executable, ROOT / "docs/pictures/draw.py", tmp_path], check=True, env=ENVIRONMENT, timeout=300)
    pictures = {p.name: p for p in (ROOT / "docs/pictures").glob("*.svg")}
    kept = set(pictures)
    assert {p.name for p in tmp_path.glob("*.svg")} == kept, "run `make pictures`"
    assert all((ROOT / "docs/pictures" / p.name).is_file() for p in tmp_path.glob("*.png")), "run `make pictures`"
    for name, old in pictures.items():
        (drawn, by), (shown, other) = (shapes_of(p.read_text()) for p in (tmp_path / name, old))
        if by == other:  # another version of matplotlib draws other letters
            assert len(drawn) == len(shown), f"{name} is out of date: run `make pictures`"
            assert np.allclose(drawn, shown, atol=0.01), f"{name} is out of date: run `make pictures`"
    shown = "".join(page.read_text() for page in PAGES)
    assert all(f"pictures/{name})" in shown for name in kept)


def test_every_public_name_has_its_signature_in_the_reference():
    import ringattn as ra

    written, page = runpy.run_path(str(ROOT / "docs/signatures.py"))["written"], ROOT / "docs/reference/api.md"
    assert written(page.read_text()) == page.read_text(), "run `make pictures`, which writes the code's signatures"
    shown = {path.rpartition(".")[2] for path in re.findall(r"<!-- ::: ([\w.]+)", page.read_text())}
    assert set(ra.__all__) - shown == {"hf", "nn"} and {*ra.hf.__all__} <= shown


def test_the_readme_of_a_package_has_no_relative_links():
    absolute, text = runpy.run_path(str(ROOT / "setup.py"))["absolute"], (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)\s]+)\)", absolute(text, "https://host/project"))
    assert links and all(link.startswith("https://host/project/") for link in links)
    assert "](" not in absolute(text, "")
