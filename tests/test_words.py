"""Words: of a command line as the fields of its Options, and of the code, one meaning each."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ringattn.launch.words import option

ROOT = Path(__file__).resolve().parent.parent
SPOKEN = {"told", "said"}  # in no name
VAGUE = SPOKEN | {"found", "known", "one", "piece"}  # no names for a result, an item, a flag
PLAIN = (
    "ringattn/torch",
    "ringattn/torch/attention",
    "ringattn/torch/inference",
    "ringattn/torch/linear",
    "ringattn/jax/inference",
    "ringattn/compat",
    "kernels/attention",
    "kernels/attention/triton",
    "kernels/linear/triton",
    "comms",
    "conf",
    "launch",
    "launch/train",
    "launch/commands",
    "launch/bench",
    "launch/verify",
)


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
    assert vague == {("comms/memory.py", "piece"), ("comms/outbox.py", "piece")}  # what one copy moves
    started = [path for room in ("launch", "conf", "comms") for path in (ROOT / room).rglob("*.py")]
    assert {path.name for path in started if "part" in names(path)} == set()  # a partial, a share, an item, a half
    rooms = ("ringattn", "kernels", "comms", "launch", "conf", "examples", "benchmarks", "tests")
    files = {path.resolve() for room in rooms for path in (ROOT / room).rglob("*.py")}
    assert {(path.name, name) for path in files for name in SPOKEN & set(names(path))} == set()


def test_names_of_tests_are_plain_english():
    spoken = {"said", "told", "heard", "hears", "alone_says", "at_hand"}
    tests = {name for path in (ROOT / "tests").glob("test_*.py") for name in names(path) if name.startswith("test_")}
    assert {name for name in tests for word in spoken if f"_{word}_" in f"{name}_"} == set()
