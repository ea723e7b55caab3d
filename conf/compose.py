"""A configuration from words on the command line, through Hydra: `seq_len=4096 model=small strategy.ulysses=2`.

Hydra composes values and does nothing else here. What it would call by name, callbacks, launchers, sweepers, log
handlers, is never made, and whatever asks for it is refused: a configuration file chooses values and runs no code.
"""

import argparse
import itertools
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from ringattn.conf import refusals, schema
from ringattn.conf.refusals import files
from ringattn.conf.schema import GROUPS, Train

USAGE = """usage: ringattn train [group=choice ...] [key=value ...]    (or torchrun ... -m ringattn.launch.train ...)

Groups choose files of conf/, keys change single values; --cfg job prints the result, --multirun with a=1,2 sweeps,
--config-dir DIR adds your own files; eval "$(ringattn train --completion)" has bash complete them.
"""

PATIENCE = 20.0  # seconds that a rank leaves the word to rank 0


def run(words: list[str], task: Callable[[Train], int], rank: int = 0, started: bool = False) -> int:
    """`task(config)` for the configuration that the words make (for each of them in a sweep); its exit status.

    What cannot be is one sentence from rank 0 and status 2. `started` means that many ranks run this at once.
    """
    if "-h" in words or "--help" in words:
        print(f"{USAGE}\n{choices()}\n\n{schema.explain()}")
        return 0
    if "--completion" in words:
        from ringattn.conf import complete

        print(complete.SCRIPT.format(python=shlex.quote(sys.executable)))
        return 0
    try:
        asked = options(words)
        if asked.multirun and started:
            raise ValueError(
                "a sweep starts many runs, and the ranks of one run are already started; sweep outside torchrun"
            )
        configs = composed(asked)
    except ModuleNotFoundError as error:
        if error.name not in ("hydra", "omegaconf", "yaml"):
            raise
        return complain("Hydra is not installed; in the checkout: pip install '.[train]'", rank)
    except ValueError as error:
        return complain(str(error), rank)
    if asked.cfg:
        for _, config in configs if rank == 0 else ():
            print(as_yaml(config), end="")
        return 0
    statuses = []
    for swept, config in configs:
        if swept:
            print(f"{swept}:", file=sys.stderr, flush=True)
        statuses.append(task(config))
    return max(statuses)


def complain(problem: str, rank: int) -> int:
    """Say what is wrong, once: on rank 0, or where rank 0 has no complaint; the status to end with."""
    if rank:
        leave_to_first()
        problem = f"rank {rank}: {problem}"
    print(f"ringattn train: {problem}", file=sys.stderr, flush=True)
    return 2


def leave_to_first() -> None:
    """Wait for rank 0 to speak and end, whereupon torchrun ends this one: what is wrong is so on all, as a rule."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(PATIENCE)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def options(words: list[str]) -> argparse.Namespace:
    """The few options, and in `words` all else. Hydra's own options are not taken: some of them run code."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-c", "--cfg", choices=["job"])
    parser.add_argument("-cd", "--config-dir", type=Path)
    asked, rest = parser.parse_known_args(words)
    asked.words = rest
    for word in asked.words:
        if word.startswith("-"):
            known = ("--multirun", "--cfg", "--config-dir", "--help", "--completion")
            raise ValueError(f"no option {word}{schema.nearest(word, list(known))}; the options are {', '.join(known)}")
    if asked.config_dir is not None and not asked.config_dir.is_dir():
        raise ValueError(f"--config-dir {asked.config_dir}: there is no such folder")
    return asked


def composed(asked: argparse.Namespace) -> list[tuple[str, Train]]:
    """Every configuration that is asked for, checked, and what a sweep says of it alone; the runs have a name each.

    A ValueError with one sentence if one of them cannot be.
    """
    from hydra import initialize_config_module
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    ConfigStore.instance().store("schema", Train)
    with initialize_config_module("ringattn.conf", job_name="train", version_base="1.3"):
        try:
            runs = [(words, compose(words, asked.config_dir)) for words in each(asked)]
        except (HydraException, OmegaConfBaseException, YAMLError) as error:
            raise ValueError(refusals.explain(error)) from error
        except KeyError as error:  # a variable of the environment that Hydra was told to copy
            raise ValueError(f"hydra.job.env_copy: {refusals.NOT_HYDRA}") from error
    names = [config.run for _, config in runs]
    for i, name in enumerate(names):
        if name is not None and names.count(name) > 1:
            runs[i][1].run = f"{name}-{i}"
    return [(" ".join(w for w in words if w not in asked.words), config) for words, config in runs]


def each(asked: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """The words of every run: in a sweep all combinations of the values that a word lists."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    axes: list[list[str]] = []
    for word in asked.words:
        problem = refusals.of_word(word, parser, asked)
        if problem:
            raise ValueError(problem)
        override = parser.parse_overrides([word])[0]
        several = override.is_sweep_override()
        axes.append(
            [f"{override.get_key_element()}={v}" for v in override.sweep_string_iterator()] if several else [word]
        )
    return itertools.product(*axes)


def compose(words: tuple[str, ...], folder: Path | None) -> Train:
    """One configuration, checked, of our files and the folder's."""
    import hydra
    from omegaconf import DictConfig, OmegaConf

    def own(composed: DictConfig) -> dict[str, Any]:
        """Hydra's own settings, but what it notes there about these very words."""
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
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.structured(config))


def choices() -> str:
    """Every group with its files and what their first line says."""
    lines = []
    for group in GROUPS:
        for name in files(group):
            text = (Path(__file__).parent / group / f"{name}.yaml").read_text().splitlines()
            about = next(line for line in text if line.startswith("# ") and "@package" not in line)
            lines.append(f"  {f'{group}={name}':<28} {about[2:]}")
    return "\n".join(lines)
