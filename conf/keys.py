"""A key of a configuration or of a command: its default, what --help says about it, and the values that it may have."""

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterable
from typing import Any

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # they would end lines of logs, and change what a terminal shows
TIMES = {"K": 2**10, "M": 2**20, "G": 2**30}  # 128K tokens are 131072
WORDS: dict[Any, str] = {
    int: "a whole number", float: "a number", bool: "true or false", str: "a word", type(None): "null",
}  # fmt: skip


def option(
    default: Any, help: str, least: int | None = None, below: int | None = None, among: tuple[str, ...] = ()
) -> Any:
    """A field of a dataclass whose value `allow` checks: one of `among`, or a number from `least` on and under `below`.

    Numbers must be above 0 unless `least` or a default of 0 allows others.
    """
    metadata = {"help": help, "least": least, "below": below, "among": among}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if callable(field.default_factory) else field.default


def listed(keys: Iterable[tuple[str, dataclasses.Field[Any]]]) -> str:
    """What --help says about keys: a line each, with the default and the meaning."""
    lines = []
    for name, field in keys:
        among = ", ".join(field.metadata["among"])
        about = f"{field.metadata['help']} ({among})" if among else field.metadata["help"]
        lines.append(f"  {name}={show(default_of(field))}".ljust(34) + f"  {about}")
    return "\n".join(lines)


def show(value: Any) -> str:
    """A value as it is written on the command line."""
    if value is None:
        return "null"
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def allow(name: str, field: dataclasses.Field[Any], value: Any) -> None:
    """A ValueError for a value, or an element of a list, that the field does not allow."""
    least, below, among = (field.metadata.get(name) for name in ("least", "below", "among"))
    for each in value if isinstance(value, list | tuple) else [value]:
        if isinstance(each, str) and CONTROL.search(each):
            raise ValueError(f"{name}={each!r}: text must be without control characters")
        if among and each is not None and each not in among:
            raise ValueError(f"{name}={each}: choose one of {', '.join(among)}{nearest(str(each), among)}")
        if isinstance(each, bool) or not isinstance(each, int | float):
            continue
        if not math.isfinite(each):
            raise ValueError(f"{name}={each}: must be a number, and finite")
        if least is None and default_of(field) != 0 and each <= 0:
            raise ValueError(f"{name}={each}: must be above 0")
        if each < (least or 0):
            raise ValueError(f"{name}={each}: must be {least or 0} or above")
        if below is not None and each >= below:
            raise ValueError(f"{name}={each}: must be below {below}")


def whole(text: str) -> str:
    """A whole number with K, M or G at its end as one without; other texts as they are."""
    digits, unit = text[:-1].replace("_", ""), text[-1:].upper()
    return str(int(digits) * TIMES[unit]) if unit in TIMES and digits.isdecimal() else text


def expected(hint: Any) -> str:
    """The values of this type, in words."""
    if isinstance(hint, types.UnionType):
        return " or ".join(map(expected, typing.get_args(hint)))
    if typing.get_origin(hint) in (list, tuple):
        return f"{expected(typing.get_args(hint)[0]).removeprefix('a ')}s separated by commas"
    return WORDS.get(hint, str(hint))


def nearest(word: str, among: Iterable[str]) -> str:
    """What was probably meant, as the end of a sentence."""
    close = difflib.get_close_matches(word, list(among), 1)
    return f"; did you mean {close[0]!r}?" if close else ""
