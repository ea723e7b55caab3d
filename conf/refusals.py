"""Errors for words and files that are no valid configuration: one sentence each, with the nearest valid name."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError
from omegaconf.resolvers import oc
from yaml import MarkedYAMLError

from ringattn.conf import schema
from ringattn.conf.keys import nearest

NOT_HYDRA = "Hydra's own settings cannot be changed here, for they can run code"


@contextmanager
def closed_environment() -> Iterator[None]:
    """A context in which neither files nor words get values from the environment, however deep the interpolation."""

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


def values_of(word: str, parser: Any, multirun: bool) -> list[str]:
    """A word as an axis of a sweep: itself, or NAME=VALUE for each value that it lists. A ValueError if it is wrong."""
    name, equals, value = word.partition("=")
    name = name.strip().lstrip("+~").partition("@")[0]
    if re.match(r"hydra\b", name):
        raise ValueError(f"{word}: {NOT_HYDRA}")
    if problem := schema.unknown(name):
        raise ValueError(problem)
    if word.startswith("~"):
        raise ValueError(f"{word}: nothing can be removed; give {name}=VALUE")
    if not equals:
        raise ValueError(f"{name} has no value; give {name}=VALUE")
    try:
        override = parser.parse_override(word)
    except HydraException:
        hint = f'quotes within quotes may help: "{name}={quoted(value)}"'
        raise ValueError(f"{word}: this value cannot be read; {hint}") from None
    if re.match(r"\W*hydra\b", override.key_or_group):
        raise ValueError(f"{word}: {NOT_HYDRA}")
    if not override.is_sweep_override():
        return [word]
    if not multirun:
        raise ValueError(f"{word}: several values are a sweep; add --multirun, or quote a value that has commas")
    if not override.is_discrete_sweep():
        raise ValueError(f"{word}: a sweep takes its values from a list, range() or choice()")
    return [f"{override.get_key_element()}={v}" for v in override.sweep_string_iterator()]


def explain(error: Exception) -> str:
    """What Hydra, OmegaConf or YAML means, in one sentence: where it is, and the nearest name that would do."""
    place = re.match(r"In '([^']+)': ", str(error))
    where = f"{place[1]}.yaml: " if place and place[1] != "config" else ""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}: {error.problem or error.context}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.partition("/")
        have = list(error.options or ())
        return f"{where}{group}={name}: choose one of {', '.join(have)}{nearest(name, have)}"
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
        return f"{where}{name}: expected {getattr(kinds[name], '__name__', kinds[name])}; {first_line(cause)}"
    return where + first_line(cause or error)


def first_line(error: BaseException) -> str:
    """Without the place that Hydra puts before it, and the way that it took."""
    line = re.sub(r"^In '[^']+': ", "", str(error).strip().partition("\n")[0])
    return line.removeprefix("ValueError raised while resolving interpolation: ")


def quoted(text: str) -> str:
    """As one value of Hydra's grammar."""
    return "'" + text.replace("'", "\\'") + "'"
