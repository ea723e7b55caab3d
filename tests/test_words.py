"""Words: of a command line as the fields of its Options, and of the code, one meaning each."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ringattn.launch.words import option

ROOT = Path(__file__).resolve().parent.parent
PLAIN = (
    "ringattn/torch/inference",
    "ringattn/jax/inference",
    "launch/train",
    "launch/commands",
    "launch/bench",
)
VAGUE = {"found", "known", "one", "piece", "told", "said"}  # no names for a result, an item, a flag


@dataclass
class Options:
    sizes: list[int] = option([1, 2], "some sizes")


def test_options_share_no_list():
    Options().sizes.append(3)
    assert Options().sizes == [1, 2]


def names(path: Path) -> Iterator[str]:
    """All names that a file gives to variables, arguments, attributes, functions and classes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg


def test_names_say_what_they_hold():
    vague = {(str(path.relative_to(ROOT)), name) for room in PLAIN for path in (ROOT / room).glob("*.py")
             for name in VAGUE & set(names(path))}  # fmt: skip
    assert vague == set()


def test_names_of_tests_are_plain_english():
    spoken = {"said", "told", "heard", "hears", "alone_says", "at_hand"}
    tests = {name for path in (ROOT / "tests").glob("test_*.py") for name in names(path) if name.startswith("test_")}
    assert {name for name in tests for word in spoken if f"_{word}_" in f"{name}_"} == set()
