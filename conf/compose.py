"""A configuration from words on the command line, through Hydra: `seq_len=4096 model=small strategy.ulysses=2`."""

import contextlib
import io
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ringattn.conf import schema
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
    loud = sys.stderr
    if "-h" in words or "--help" in words:
        print(f"{USAGE}\n{choices()}\n\n{schema.explain()}")
        return 0
    if "--completion" in words:
        from ringattn.conf import complete

        print(complete.SCRIPT.format(python=shlex.quote(sys.executable)))
        return 0
    problem = refuse(words, started)
    if problem:
        return complain(problem, rank)
    import hydra
    from hydra.core.config_store import ConfigStore
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    ConfigStore.instance().store("schema", Train)
    statuses = []

    def job(composed: DictConfig) -> None:
        with contextlib.redirect_stderr(loud):
            try:
                config = schema.check(OmegaConf.to_object(composed))  # type: ignore[arg-type]
            except (ValueError, OmegaConfBaseException) as error:
                statuses.append(complain(str(error).splitlines()[0], rank))
                return
            statuses.append(task(config))

    overrides = [w for w in words if w[:1] == "~" or ("=" in w and w[:1] != "-")]  # argparse wants them side by side
    sys.argv = ["ringattn train", *overrides, *(w for w in words if w not in overrides)]
    quiet = contextlib.redirect_stderr(io.StringIO()) if rank else contextlib.nullcontext()
    try:
        with quiet:
            hydra.main(version_base="1.3", config_path="pkg://ringattn.conf", config_name="config")(job)()
    except SystemExit:  # Hydra has said what is wrong
        if rank:
            leave_to_first()
        raise
    return max(statuses, default=0)


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


def refuse(words: list[str], started: bool) -> str | None:
    """What is wrong with the words before Hydra sees them: an unknown key, also one that + would add."""
    for word in words:
        if word in ("-m", "--multirun") and started:
            return "a sweep starts many runs, and the ranks of one run are already started; sweep outside torchrun"
        if word.startswith("-"):
            continue
        name, equals, value = word.partition("=")
        name = name.lstrip("+~").partition("@")[0]
        if not name or name.startswith(("hydra.", "hydra/")) or (not equals and not word.startswith("~")):
            continue
        problem = schema.unknown(name) or unknown_choice(name, value, words) or wrong_type(word, name)
        if problem:
            return problem
    return None


def unknown_choice(group: str, value: str, words: list[str]) -> str | None:
    """Why `group=value` names no file; None where it does, and where other folders may hold it."""
    if group not in GROUPS or "--config-dir" in words or any(w.startswith(("--config-dir=", "-cd")) for w in words):
        return None
    have = files(group)
    for one in value.split(","):
        if one not in (*have, "null"):
            return f"{group}={one}: choose one of {', '.join(have)}{schema.nearest(one, have)}"
    return None


def wrong_type(word: str, name: str) -> str | None:
    """Why a key cannot have the word's value; None where it can, and for what is no single value of a key."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    kinds = {key: f.type for key, f in schema.every_key()}
    try:
        override = OverridesParser.create().parse_override(word)
        if name in kinds and not override.is_delete() and not override.is_sweep_override():
            OmegaConf.update(OmegaConf.structured(Train), name, override.value())
    except HydraException as error:
        return f"{word}: {str(error).splitlines()[0]}; quotes around the value may help"
    except OmegaConfBaseException:
        return f"{word}: expected {getattr(kinds[name], '__name__', kinds[name])}"
    return None


def files(group: str) -> list[str]:
    return sorted(p.stem for p in (Path(__file__).parent / group).glob("*.yaml"))


def choices() -> str:
    """Every group with its files and what their first line says."""
    lines = []
    for group in GROUPS:
        for name in files(group):
            text = (Path(__file__).parent / group / f"{name}.yaml").read_text().splitlines()
            about = next(line for line in text if line.startswith("# ") and "@package" not in line)
            lines.append(f"  {f'{group}={name}':<28} {about[2:]}")
    return "\n".join(lines)
