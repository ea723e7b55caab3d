"""The command line: `ringattn NAME key=value ...`, the same words for every command, without Hydra.

A command is a module of this folder with a docstring, a dataclass `Options` whose fields are its keys (a field's
metadata says what it means), and `run(options) -> int | None`; `bench`, which has suites, brings a `main(words)` of
its own. Nothing else is registered anywhere.
"""

import ast
import dataclasses
import difflib
import sys
import types
import typing
from importlib import import_module
from typing import Any

COMMANDS = {
    "train": "train a model whose sequence is spread over ranks",
    "verify": "prove that attention over ranks equals dense float64 attention, on this machine",
    "plan": "show the candidate plans for a shape, with their predicted times and the reason for the choice",
    "aot": "compile a plan for a TPU topology, without a TPU: memory, and whether its hops overlap",
    "bench": "time and measure, side by side; one JSON line a row",
    "tune": "measure kernel configurations on this GPU and write a table of the best",
    "plot": "draw pictures from benchmark lines",
    "doctor": "say what this machine has, what works, and what to do about what does not",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; a wrong call is one sentence and exit status 2, and a reader that went away is no error."""
    try:
        return command(argv)
    except BrokenPipeError:
        sys.stderr.close()  # or the interpreter complains about what it could not write
        return 1


def command(argv: list[str] | None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    name, words = argv[0], argv[1:]
    if name not in COMMANDS:
        print(f"ringattn: no command {name!r}{nearest(name, COMMANDS)}\n\n{overview()}", file=sys.stderr)
        return 2
    try:
        module = import_module(f"ringattn.launch.{name}")
    except ImportError as error:
        if (error.name or "").startswith("ringattn"):
            raise
        print(f"ringattn {name}: {error.name or error} is not installed (pip install 'ringattn[dev]')", file=sys.stderr)
        return 2
    return module.main(words) if hasattr(module, "main") else call(name, module, words)


def call(name: str, module: types.ModuleType, words: list[str]) -> int:
    """Parse the words into the module's Options and run it; --help explains them."""
    if any(w in ("-h", "--help") for w in words):
        print(usage(name, module))
        return 0
    try:
        options = parse(words, module.Options)
    except ValueError as error:
        print(f"ringattn {name}: {error}", file=sys.stderr)
        return 2
    return module.run(options) or 0


def overview() -> str:
    rows = [f"  {name:<8} {what}" for name, what in COMMANDS.items()]
    return "\n".join(["usage: ringattn NAME [key=value ...]    (ringattn NAME --help)", "", *rows])


def usage(name: str, module: types.ModuleType) -> str:
    fields = dataclasses.fields(module.Options)
    rows = [f"  {f.name}={show(default_of(f))}".ljust(34) + "  " + f.metadata.get("help", "") for f in fields]
    return "\n".join([f"usage: ringattn {name} [key=value ...]", "", (module.__doc__ or "").strip(), "", *rows])


def option(default: Any, help: str) -> Any:
    """A field of an `Options` dataclass: its default and the line that --help shows."""
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: default, metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})


def parse(words: list[str], options: type) -> Any:
    """An `Options` from key=value words; a bare word sets the first field. Unknown keys and wrong types are refused."""
    fields = {f.name: f for f in dataclasses.fields(options)}
    hints = typing.get_type_hints(options)
    given = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals and not word.startswith("-"):
            key, text = next(iter(fields)), word
        key = key.lstrip("-").replace("-", "_")
        if key not in fields:
            raise ValueError(f"no option {key!r}{nearest(key, fields)}; the options are {', '.join(fields)}")
        given[key] = convert(key, text if equals or not word.startswith("-") else "true", hints[key])
    return options(**given)


def convert(key: str, text: str, hint: Any) -> Any:
    """`text` as the field's type: int, float, bool, str, None, or a list of these written 1,2,4."""
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(None) in allowed and text.lower() in ("none", "null", ""):
        return None
    for kind in allowed:
        origin = typing.get_origin(kind)
        if origin in (list, tuple):
            inner = typing.get_args(kind)[0]
            return origin(convert(key, part, inner) for part in text.strip("[]()").split(",") if part)
        if kind is bool and text.lower() in ("true", "false", "1", "0", "yes", "no"):
            return text.lower() in ("true", "1", "yes")
        if kind is str:
            return text
        if kind in (int, float):
            try:
                value = ast.literal_eval(text.replace("_", ""))
            except (ValueError, SyntaxError):
                continue
            if isinstance(value, int) or (kind is float and isinstance(value, float)):
                return kind(value)
    expected = " or ".join(getattr(k, "__name__", str(k)) for k in allowed)
    raise ValueError(f"{key}={text}: expected {expected}")


def nearest(word: str, among: Any) -> str:
    close = difflib.get_close_matches(word, list(among), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def default_of(field: Any) -> Any:
    return field.default_factory() if field.default is dataclasses.MISSING else field.default


def show(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
