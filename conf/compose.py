"""A configuration from words on the command line, through Hydra: `seq_len=4096 model=small strategy.ulysses=2`.

Hydra composes values and does nothing else here: what it would call by name (callbacks, launchers, log handlers) never
is made, so a configuration file chooses values and runs no code. Nor does it read the environment: what is there may be
secret, and a configuration is printed, saved and logged. What is not valid is an error of one sentence.
"""

import re
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError
from yaml import AliasToken, MarkedYAMLError, YAMLError, scan

from ringattn.conf import schema
from ringattn.conf.keys import expected, nearest, whole
from ringattn.conf.schema import Train

ALIASES_LIMIT = 16  # of a file: aliases of aliases make Hydra compose for minutes


def composed(words: list[str]) -> Train:
    """The configuration that the words make, checked; a ValueError with one sentence if it is not valid."""
    folder, words = apart(words)
    path = "" if folder is None else f"file://{folder.resolve()}".replace("'", "\\'")
    where = [f"hydra.searchpath=['{path}']"] if path else []
    ConfigStore.instance().store("schema", Train)
    OmegaConf.register_new_resolver("oc.env", refuse, replace=True)
    with hydra.initialize_config_module("ringattn.conf", "train", version_base="1.3"):
        try:
            check_aliases(folder)
            config = hydra.compose("config", where + words)  # Hydra's own settings in it have no effect
            return schema.check(OmegaConf.to_object(config))  # type: ignore[arg-type]
        except (HydraException, OmegaConfBaseException, YAMLError) as error:
            raise ValueError(explain(error)) from error


def apart(words: list[str]) -> tuple[Path | None, list[str]]:
    """The folder that --config-dir names, and the other words. Hydra's own options are not taken: some run code."""
    folder, others, rest = None, [], iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name == "--config-dir":
            folder = Path(value if equals else next(rest, ""))
            if not folder.is_dir():
                raise ValueError(f"--config-dir {folder}: there is no such folder")
        elif word.startswith("-"):
            raise ValueError(f"no option {word} (there are --cfg job, --config-dir, --help)")
        else:
            others.append(override(word))
    return folder, others


def override(word: str) -> str:
    """A word as Hydra takes it; a ValueError if it names no key, or gives it no value."""
    key, equals, value = word.partition("=")
    name = key.strip().lstrip("+~").partition("@")[0]
    if problem := schema.unknown(name):
        raise ValueError(problem)
    if word.startswith("~") or not equals:
        raise ValueError(f"{word}: give {name}=VALUE")
    numeric = "int" in str(next((f.type for n, f in schema.every_key() if n == name), None))
    return f"{key}={whole(value)}" if numeric else word


def check_aliases(folder: Path | None) -> None:
    """A ValueError for a file of the user that repeats parts of itself too often."""
    for path in sorted(folder.rglob("*.yaml")) if folder else []:
        aliases = sum(isinstance(token, AliasToken) for token in scan(path.read_bytes()))
        if aliases > ALIASES_LIMIT:
            raise ValueError(
                f"{path} has {aliases} YAML aliases (*name), and at most {ALIASES_LIMIT} are taken; write values out"
            )


def refuse(name: str = "", *default: object) -> None:
    """Neither files nor words get values from the environment, however deep the interpolation."""
    raise ValueError(f'${{oc.env:{name}}} is refused, as it may be a secret; give KEY="${name}" in the shell')


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
    if isinstance(error, OverrideParseException):
        return f"""{error.override}: this value cannot be read; quotes within quotes may help: "KEY='VALUE'\""""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    name = getattr(cause, "full_key", None) or ""
    line = re.sub(r"^In '[^']+': ", "", str(cause or error).strip().partition("\n")[0])
    line = line.removeprefix("ValueError raised while resolving interpolation: ")
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        line = schema.unknown(name) or line
    kinds = {key: f.type for key, f in schema.every_key()}
    if isinstance(cause, ValidationError) and name in kinds:
        line = f"{name}: expected {expected(kinds[name])}; {line}"
    return where + line
