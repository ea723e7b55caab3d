"""A configuration from words on the command line, through Hydra: `seq_len=4096 model=small strategy.ulysses=2`.

Hydra composes values and does nothing else here. What it would call by name, callbacks, launchers, sweepers, log
handlers, is never made, and whatever asks for it is refused: a configuration file chooses values and runs no code.
Nor does it read the environment: what is there may be secret, and a configuration is printed, saved and logged.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ringattn.conf import refusals, schema
from ringattn.conf.keys import nearest
from ringattn.conf.schema import Train

KNOWN = ("--multirun", "--cfg", "--config-dir", "--help", "--completion")


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
    with refusals.closed_environment(), hydra.initialize_config_module("ringattn.conf", "train", version_base="1.3"):
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        try:
            axes = [refusals.values_of(word, parser, given.multirun) for word in given.words]
            runs = [(words, compose(words, given.config_dir)) for words in itertools.product(*axes)]
        except (HydraException, OmegaConfBaseException, YAMLError) as error:
            raise ValueError(refusals.explain(error)) from error
        except KeyError as error:  # env_copy names a variable of the environment
            raise ValueError(f"hydra.job.env_copy: {refusals.NOT_HYDRA}") from error
    names = [config.run for _, config in runs]
    for i, name in enumerate(names):
        if name is not None and names.count(name) > 1:
            runs[i][1].run = f"{name}-{i}"
    return [(" ".join(w for w in words if w not in given.words), config) for words, config in runs]


def compose(words: tuple[str, ...], folder: Path | None) -> Train:
    """One configuration, checked, of our files and the folder's."""

    def own(composed: DictConfig) -> dict[str, Any]:
        """Hydra's own settings, except what it notes there about these very words."""
        found: Any = OmegaConf.to_container(composed.hydra)
        found["job"].pop("override_dirname")
        return {k: v for k, v in found.items() if k not in ("overrides", "runtime", "searchpath")}

    place = [] if folder is None else [f"hydra.searchpath=[{refusals.quoted(f'file://{folder.resolve()}')}]"]
    result = hydra.compose("config", [*place, *words], return_hydra_config=True)
    usual = own(hydra.compose("config", place, return_hydra_config=True))
    for name, value in own(result).items():
        if value != usual.get(name):
            raise ValueError(f"hydra.{name}: {refusals.NOT_HYDRA}")
    del result.hydra
    return schema.check(OmegaConf.to_object(result))  # type: ignore[arg-type]


def as_yaml(config: Train) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))
