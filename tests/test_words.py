"""Words: of a command line as the fields of its Options, and of the code, one meaning each."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ringattn.launch.words import option

ROOT = Path(__file__).resolve().parent.parent
SPOKEN = {"told", "said"}  # in no name
VAGUE = SPOKEN | {"found", "known", "one", "piece"}  # no names for a result, an item, a flag
ROOMS = ("ringattn", "kernels", "comms", "launch", "conf")
MEANINGS = {  # words that have one meaning in names, and where they are used
    "alone": ("ringattn/", "kernels/rates.py", "launch/"),  # on one device
    "cut": ("ringattn/jax/",),  # the axes of a mesh that cut an array
    "part": ("kernels/", "ringattn/torch/attention/", "ringattn/jax/attention/"),  # a Partial
    "place": ("ringattn/", "comms/"),  # where a rank stands among the ranks
}


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


def modules(*rooms: str) -> dict[str, Path]:
    """The Python files of rooms, by their paths from the root."""
    files = {path.resolve() for room in rooms for path in (ROOT / room).rglob("*.py")}
    return {str(path.relative_to(ROOT)): path for path in sorted(files)}


def test_names_say_what_they_hold():
    held = {name: set(names(path)) for name, path in modules(*ROOMS).items()}
    vague = {(path, name) for path, given in held.items() for name in VAGUE & given}
    assert vague == {("comms/memory.py", "piece")}  # what one copy moves
    others = {
        (path, word) for word, rooms in MEANINGS.items() for path, given in held.items()
        if word in given and not path.startswith(rooms)
    }  # fmt: skip
    assert others == set()
    every = modules(*ROOMS, "examples", "benchmarks", "tests")
    assert {(path, name) for path, file in every.items() for name in SPOKEN & set(names(file))} == set()


def test_names_of_tests_are_plain_english():
    spoken = {"said", "told", "heard", "hears", "alone_says", "at_hand"}
    tests = {name for path in (ROOT / "tests").glob("test_*.py") for name in names(path) if name.startswith("test_")}
    assert {name for name in tests for word in spoken if f"_{word}_" in f"{name}_"} == set()
