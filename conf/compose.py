"""A configuration from words on the command line, through Hydra: `seq_len=4096 model=small strategy.ulysses=2`.

Hydra composes values and does nothing else here: what it would call by name (callbacks, launchers, log handlers) never
is made, so a configuration file chooses values and runs no code. Nor does it read the environment: what is there may be
secret, and a configuration is printed, saved and logged. What is not valid is an error of one sentence.
"""

import argparse
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError
from omegaconf.resolvers import oc
from yaml import AliasToken, MarkedYAMLError, YAMLError, scan

from ringattn.conf import schema
from ringattn.conf.keys import expected, nearest, whole
from ringattn.conf.schema import Train

ALIASES = 16  # of a file: aliases of aliases make Hydra compose for minutes
KNOWN = ("--multirun", "--cfg", "--config-dir", "--help")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def options(words: list[str]) -> argparse.Namespace:
    """The few options, and in `words` all else. Hydra's own options are not taken: some of them run code."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-c", "--cfg", choices=["job"])
    parser.add_argument("-cd", "--config-dir", type=Path)
    given, rest = parser.parse_known_args(words)
    given.words = rest
    for word in given.words:
        if word.startswith("-"):
            raise ValueError(f"no option {word}{nearest(word, KNOWN)} (there are {', '.join(KNOWN)})")
    if given.config_dir is not None and not given.config_dir.is_dir():
        raise ValueError(f"--config-dir {given.config_dir}: there is no such folder")
    return given


def composed(given: argparse.Namespace) -> list[tuple[str, Train]]:
    """Every configuration that the words make, checked, with the words that a sweep adds for it alone.

    In a sweep these are all combinations of the values that a word lists, and each run has its own name. A ValueError
    with one sentence if a configuration is not valid.
    """
    ConfigStore.instance().store("schema", Train)
    with closed_environment(), hydra.initialize_config_module("ringattn.conf", "train", version_base="1.3"):
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        try:
            check_aliases(given.config_dir)
            axes = [values_of(word, parser, given.multirun) for word in given.words]
            runs = [(words, compose(words, given.config_dir)) for words in itertools.product(*axes)]
        except (HydraException, OmegaConfBaseException, YAMLError) as error:
            raise ValueError(explain(error)) from error
    names = [config.run for _, config in runs]
    for i, name in enumerate(names):
        if name is not None and names.count(name) > 1:
            runs[i][1].run = f"{name}-{i}"
    return [(" ".join(w for w in words if w not in given.words), config) for words, config in runs]


def check_aliases(folder: Path | None) -> None:
    """A ValueError for a file of the user that repeats parts of itself too often."""
    for path in sorted(folder.rglob("*.yaml")) if folder else []:
        aliases = sum(isinstance(token, AliasToken) for token in scan(path.read_bytes()))
        if aliases > ALIASES:
            raise ValueError(
                f"{path} has {aliases} YAML aliases (*name), and at most {ALIASES} are taken; write values out"
            )


def compose(words: tuple[str, ...], folder: Path | None) -> Train:
    """One configuration, checked, of our files and the folder's. Hydra's own settings in it have no effect."""
    own_files = [] if folder is None else [f"hydra.searchpath=[{quoted(f'file://{folder.resolve()}')}]"]
    return schema.check(OmegaConf.to_object(hydra.compose("config", [*own_files, *words])))  # type: ignore[arg-type]


def as_yaml(config: Train) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))


@contextmanager
def closed_environment() -> Iterator[None]:
    """A context in which neither files nor words get values from the environment, however deep the interpolation."""

    def refuse(name: str = "", *default: object) -> None:
        raise ValueError(f'${{oc.env:{name}}} is refused, as it may be a secret; give KEY="${name}" in the shell')

    OmegaConf.register_new_resolver("oc.env", refuse, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def values_of(word: str, parser: Any, multirun: bool) -> list[str]:
    """A word as an axis of a sweep: itself, or NAME=VALUE for each value that it lists. A ValueError if it is wrong."""
    name, equals, value = word.partition("=")
    name = name.strip().lstrip("+~").partition("@")[0]
    if problem := schema.unknown(name):
        raise ValueError(problem)
    if word.startswith("~") or not equals:
        raise ValueError(f"{word}: give {name}=VALUE")
    try:
        override = parser.parse_override(word)
    except HydraException:
        hint = f'quotes within quotes may help: "{name}={quoted(value)}"'
        raise ValueError(f"{word}: this value cannot be read; {hint}") from None
    numeric = "int" in str(next((f.type for key, f in schema.every_key() if key == name), None))
    if not override.is_sweep_override():
        return [f"{word.partition('=')[0]}={whole(value)}" if numeric else word]
    if not multirun:
        raise ValueError(f"{word}: several values are a sweep; add --multirun, or quote a value that has commas")
    return [f"{override.get_key_element()}={whole(v) if numeric else v}" for v in override.sweep_string_iterator()]


def explain(error: Exception) -> str:
    """What Hydra, OmegaConf or YAML means, in one sentence: where it is, and the nearest name that would do."""
    at = re.match(r"In '([^']+)': ", str(error))
    where = f"{at[1]}.yaml: " if at and at[1] != "config" else ""
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
    if isinstance(cause, ValidationError) and name in kinds:
        return f"{where}{name}: expected {expected(kinds[name])}; {first_line(cause)}"
    return where + first_line(cause or error)


def first_line(error: BaseException) -> str:
    """Without the place that Hydra puts before it, and the way that it took."""
    line = re.sub(r"^In '[^']+': ", "", str(error).strip().partition("\n")[0])
    return line.removeprefix("ValueError raised while resolving interpolation: ")


def quoted(text: str) -> str:
    """As one value of Hydra's grammar."""
    return "'" + text.replace("'", "\\'") + "'"
