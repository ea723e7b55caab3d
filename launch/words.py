"""The command line: `ringattn NAME key=value ...`, the same words for every command, without Hydra.

A command is a module with a docstring, a dataclass `Options` whose fields are its keys, and
`run(options) -> int | None`, whose ValueErrors are printed as usage errors. `train` and `bench` have their own
`main(words)`. COMMANDS and FOLDERS below list all commands.
"""

import dataclasses
import os
import sys
import types
import typing
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import ringattn
from ringattn.conf.keys import allow, expected, listed, nearest, whole
from ringattn.conf.keys import option as option
from ringattn.conf.keys import show as show
from ringattn.launch.processes import sentence

COMMANDS = {
    "train": "train a model whose sequence is spread over ranks",
    "verify": "prove that attention over ranks equals dense float64 attention, on this machine",
    "plan": "show the candidate plans for a shape, with their predicted times and the reason for the choice",
    "simulate": "play a plan event by event on a described machine: slow ranks, shared links, thousands of ranks",
    "calibrate": "measure this machine in under a minute and write its description, which plans find",
    "bench": "time and measure, side by side; one JSON line a row",
    "plot": "draw pictures from benchmark lines",
    "doctor": "show what this machine has, what works, and how to fix what does not",
}
FOLDERS = {"train": "train.start", "verify": "verify.command", "bench": "bench"}  # the others are commands/NAME.py


def main(argv: list[str] | None = None) -> int:
    """Run one command. A usage error is one sentence and exit status 2; a closed output pipe is not an error."""
    try:
        return command(argv)
    except KeyboardInterrupt:
        print("ringattn: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # else the interpreter reports the failed write
        return 1


def command(argv: list[str] | None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if argv[0] == "--version":
        print(f"ringattn {ringattn.__version__}")
        return 0
    name, words = argv[0], argv[1:]
    if name not in COMMANDS:
        print(f"ringattn: no command {name!r}{nearest(name, COMMANDS)}\n\n{overview()}", file=sys.stderr)
        return 2
    module = f"ringattn.launch.{FOLDERS.get(name, f'commands.{name}')}"
    return answer(name, lambda: call(name, import_module(module), words))


def call(name: str, module: types.ModuleType, words: list[str]) -> int | None:
    """Parse the words into the module's Options and run it; --help shows them."""
    if hasattr(module, "main"):
        return module.main(words)
    if any(w in ("-h", "--help") for w in words):
        print(usage(name, module.__doc__ or "", module.Options))
        return 0
    return module.run(module.Options(**values(words, module.Options)))


def answer(name: str, work: Callable[[], int | None]) -> int:
    """The exit status of `work`; after a usage error, whose sentence is printed, 2."""
    try:
        return work() or 0
    except Exception as error:
        text = sentence(error)
        if text is None:
            raise
        print(f"ringattn {name}: {text}", file=sys.stderr)
        return 2


def overview() -> str:
    rows = [f"  {name:<8} {what}" for name, what in COMMANDS.items()]
    return "\n".join(["usage: ringattn NAME [key=value ...]    (ringattn NAME --help; ringattn --version)", "", *rows])


def usage(name: str, about: str, options: Any) -> str:
    """What --help shows: the docstring of a command, and its keys with their defaults and meaning."""
    keys = listed((f.name, f) for f in dataclasses.fields(options))
    return f"usage: ringattn {name} [key=value ...]\n\n{about.strip()}\n\n{keys}"


def values(words: list[str], options: type) -> dict[str, Any]:
    """The fields of an `Options` that key=value words set; a bare word is the value of the first field.

    Unknown or repeated keys, wrong types and values that are not allowed are refused.
    """
    fields = {f.name: f for f in dataclasses.fields(options)}
    hints = typing.get_type_hints(options)
    given = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            if key in fields or word.startswith("-"):
                raise ValueError(f"{word!r} is not KEY=VALUE; give {key.lstrip('-')}=VALUE")
            key, text = next(iter(fields)), word
        if key not in fields:
            raise ValueError(f"no option {key!r}{nearest(key, fields)} (there are {', '.join(fields)})")
        if key in given:
            raise ValueError(f"{key} is given twice; give it once")
        given[key] = convert(key, text, hints[key])
        allow(key, fields[key], given[key])
    return given


def convert(key: str, text: str, hint: Any) -> Any:
    """`text` as the field's type: int, float, bool, str, None, or a list of these written 1,2,4."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(None) in kinds and text.lower() in ("none", "null", ""):
        return None
    for kind in kinds:
        origin = typing.get_origin(kind)
        try:
            if origin in (list, tuple):
                inner = typing.get_args(kind)[0]
                return origin(convert(key, item, inner) for item in text.strip("[]()").split(",") if item)
            if kind is bool:
                return ("false", "0", "no", "true", "1", "yes").index(text.lower()) > 2
            if kind in (int, float, str):
                return kind(text if kind is str else whole(text))
        except ValueError:
            continue
    raise ValueError(f"{key}={text}: expected {expected(hint)}")


def writable(path: Path) -> Path:
    """The file that out= names; an OSError before the work begins if it cannot be written."""
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OSError(f"out={path} cannot be written; give another out=FILE")
    return path
