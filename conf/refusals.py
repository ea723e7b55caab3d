"""Errors for words and files that make no configuration: one sentence each, with the nearest valid name."""

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ringattn.conf import schema

NOT_HYDRA = "Hydra's own settings cannot be changed here, for they can run code"


@contextmanager
def closed_environment() -> Iterator[None]:
    """A context in which neither files nor words get values from the environment, however deep the interpolation."""
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    def refuse(name: str = "", *default: object) -> None:
        raise ValueError(
            f"${{oc.env:{name}}} is refused, because the configuration is printed, saved and logged, and a variable of "
            f'the environment may be a secret; give the value itself, as KEY="${name}" in the shell'
        )

    OmegaConf.register_new_resolver("oc.env", refuse, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def of_word(word: str, parser: Any, given: argparse.Namespace) -> str | None:
    """What is wrong with one word, if anything: its name, its value, or that it lists several outside a sweep."""
    from hydra.errors import HydraException

    name, equals, value = word.partition("=")
    name = name.strip().lstrip("+~").partition("@")[0]
    if re.match(r"hydra\b", name):
        return f"{word}: {NOT_HYDRA}"
    problem = schema.unknown(name)
    if problem:
        return problem
    if word.startswith("~"):
        return f"{word}: nothing can be taken away; say {name}=VALUE"
    if not equals:
        return f"{name} has no value; say {name}=VALUE"
    try:
        override = parser.parse_overrides([word])[0]
    except HydraException:
        return f'{word}: this value cannot be read; quotes within quotes may help: "{name}={quoted(value)}"'
    if re.match(r"\W*hydra\b", override.key_or_group):
        return f"{word}: {NOT_HYDRA}"
    if override.is_sweep_override():
        if not given.multirun:
            return f"{word}: several values are a sweep; add --multirun, or put quotes around a value with commas"
        if not override.is_discrete_sweep():
            return f"{word}: a sweep takes its values from a list, range() or choice()"
    return None


def files(group: str, folder: Path | None = None) -> list[str]:
    """What a group offers: our files, and those of the folder."""
    places = [Path(__file__).parent, *([folder] if folder else [])]
    return sorted({p.stem for place in places for p in (place / group).glob("*.yaml")})


def kind_name(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))


def explain(error: Exception) -> str:
    """What Hydra, OmegaConf or YAML means, in one sentence: where it is, and the nearest name that would do."""
    from hydra.errors import MissingConfigException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError
    from yaml import MarkedYAMLError

    place = re.match(r"In '([^']+)': ", str(error))
    where = f"{place[1]}.yaml: " if place and place[1] != "config" else ""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}: {error.problem or error.context}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.partition("/")
        have = list(error.options or ())
        return f"{where}{group}={name}: choose one of {', '.join(have)}{schema.nearest(name, have)}"
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    name = getattr(cause, "full_key", None) or ""
    kinds = {key: f.type for key, f in schema.every_key()}
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and schema.unknown(name):
        return f"{where}{schema.unknown(name)}"
    if isinstance(cause, ConfigKeyError) and name == "experiment":
        return f"{where}its first line must be # @package _global_"
    if isinstance(cause, ValidationError) and name in kinds:
        return f"{where}{name}: expected {kind_name(kinds[name])}; {first_line(cause)}"
    return where + first_line(cause or error)


def first_line(error: BaseException) -> str:
    """Without the place that Hydra puts before it, and the way that it took."""
    line = re.sub(r"^In '[^']+': ", "", str(error).strip().partition("\n")[0])
    return line.removeprefix("ValueError raised while resolving interpolation: ")


def quoted(text: str) -> str:
    """As one value of Hydra's grammar."""
    return "'" + text.replace("'", "\\'") + "'"
