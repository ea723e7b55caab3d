"""Cheap checks of the docs: pages that are reachable and short, errors that exist, slips of the pen."""

import ast
import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
SIGNATURE = re.compile(r"<!-- ::: ([\w.]+)((?: \w+)*) -->.*?<!-- end -->", re.DOTALL)
SOURCES = ("ringattn", "comms", "kernels", "launch")


def errors() -> str:
    """Every string of the sources, with `...` for what is filled in, and one separator between strings."""
    results = []
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    results.append("".join(str(v.value) if isinstance(v, ast.Constant) else "..." for v in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    results.append(node.value)
    return "\n".join(results)


def test_errors_of_the_troubleshooting_page_exist():
    page, texts = (ROOT / "docs/troubleshooting.md").read_text(), errors()
    first = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `") or " after `" in line]
    quoted = [words for cell in first for words in re.findall(r"`([^`]+)`", cell)]
    phrases = [phrase.strip() for words in quoted for phrase in words.split("...") if len(phrase.strip()) > 2]
    assert len(phrases) > 30
    assert [phrase for phrase in phrases if phrase not in texts] == []


def test_every_page_is_in_the_site_and_short():
    text = (ROOT / "mkdocs.yml").read_text()
    nav = set(re.findall(r"[\w/-]+\.md", text[text.index("\nnav:") :]))
    assert nav == {str(page.relative_to(ROOT / "docs")) for page in DOCS}
    long = [page.name for page in DOCS if len(SIGNATURE.sub("", page.read_text()).splitlines()) > 250]
    assert long == []
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_prose_has_no_slips():
    """Doubled words, and doubled or missing punctuation, outside of code and tables."""
    code = re.compile(r"^```.*?^```|`[^`]*`|\]\([^)]*\)|^\|.*?$|^    .*?$", re.MULTILINE | re.DOTALL)
    slip = re.compile(r"\b([A-Za-z]{2,}) \1\b|,,|(?<!\.)\.\. | ,|\(\s|\s\)")
    pages = [*ROOT.glob("*.md"), *DOCS]
    slips = {
        (page.name, m[0]) for page in pages for m in slip.finditer(code.sub("`", page.read_text()).replace("\n", " "))
    }
    assert slips == set()


def test_every_public_name_has_its_signature_in_the_reference():
    import ringattn as ra

    written = runpy.run_path(str(ROOT / "docs/signatures.py"))["written"]
    page = (ROOT / "docs/reference/api.md").read_text()
    assert written(page) == page, "run `make pictures`, which writes the signatures of the code into api.md"
    shown = {path.rpartition(".")[2] for path, _ in SIGNATURE.findall(page)}
    assert set(ra.__all__) - shown == {"hf", "nn"}
    assert {*ra.hf.__all__} <= shown


def test_the_readme_of_a_package_has_no_relative_links():
    absolute, text = runpy.run_path(str(ROOT / "setup.py"))["absolute"], (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)\s]+)\)", absolute(text, "https://host/project"))
    assert links and all(link.startswith("https://host/project/") for link in links)
    pictures = [link.removeprefix("https://host/project/raw/main/") for link in links if "/raw/" in link]
    assert len(pictures) == 2 and all((ROOT / p).suffix == ".png" and (ROOT / p).is_file() for p in pictures)
    assert "](" not in absolute(text, "")
