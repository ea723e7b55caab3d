"""A description of a machine: what a GPU computes, what its memory holds, and how fast the links are.

A description is a small TOML file (`machines/`, or your own): SI units, bytes and seconds, rates in TFLOP/s. No number
of a machine stands in code.
"""

import difflib
import sys
import tomllib
import warnings
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, field
from functools import cache, cached_property, lru_cache
from json import dumps, loads
from math import inf
from pathlib import Path
from typing import Any, get_args

import numpy as np

from ringattn.masks.values import Value, fields

SHIPPED = Path(__file__).parent / "machines"
OWN = Path.home() / ".cache" / "ringattn" / "machine.toml"  # written by `ringattn calibrate`
DEVICES = {"cuda": "h200", "tpu": "v6e", "cpu": "cpu"}  # what is assumed of a device that is not known better
ITEMS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # bytes
BY_BYTES = {8: "float64", 4: "float32", 2: "bfloat16"}
PAIR = tuple[float, float]  # forward and backward
RATES = Mapping[str, PAIR]


class Link(Value):
    """`bandwidth` is bytes a second each way, `latency` seconds a transfer; `sharing` GPUs of a host use one link."""

    bandwidth: float
    latency: float
    sharing: int = 1

    def seconds(self, nbytes: Any, messages: Any = 0, senders: Any = 1) -> Any:
        """Of so many messages with so many bytes in all, while so many GPUs of the host send as much.

        All times of links come from here: a subclass is another model of them.
        """
        return nbytes * (np.minimum(senders, self.sharing) / self.bandwidth) + messages * self.latency


class Machine(Value):
    """Hosts with equally many GPUs (or TPU slices with their chips), of one kind.

    rates      TFLOP/s forward and backward, by "kernel/mask/width" as in `kernels/rates.py`, by "kernel/dtype", or by
               dtype for kernels without a row
    half       queries x heads of a rank with which a kernel reaches half of its rate, forward and backward
    launch     seconds that a step takes beside its work, forward and backward
    start      seconds of the host until a call's first kernel runs, forward and backward
    replay     the same of a call that is replayed as a CUDA graph
    step       seconds of the host for each step of a call over ranks that no compiler or graph launches
    library    how many more such a step takes if the kernel is that of another library
    exchange   seconds of the host for each exchange of a group's heads, or of all keys
    room       the most bytes of keys that a step brings at once: few large steps fill a GPU better than many small ones
    products   TFLOP/s of the matrix products of a model's other layers
    group      where copy engines move what `inside` says: the bandwidth of a process group within a host, which moves
               less a second, and by how many seconds it starts sooner
    cores      how many ranks of a host compute at these rates at once, on CPUs; more share them evenly. 0: all
    """

    name: str
    device: str
    gpus: int
    memory: float
    bandwidth: float
    inside: Link
    between: Link
    rates: RATES = field(hash=False)
    source: str
    chip: str = ""
    arch: tuple[int, ...] = ()
    products: float = 0.0
    half: PAIR = (0.0, 0.0)
    launch: PAIR = (0.0, 0.0)
    start: PAIR = (0.0, 0.0)
    replay: PAIR = (0.0, 0.0)
    step: PAIR = (0.0, 0.0)
    library: float = 0.0
    exchange: float = 0.0
    room: float = 0.0
    group: PAIR = (0.0, 0.0)
    cores: float = 0.0

    def rate(self, keys: tuple[str, ...]) -> tuple[float, float]:
        """Flops a second, forward and backward, of the first of these rows that there is."""
        row = next((self.rates[key] for key in keys if key in self.rates), None)
        if row is None:
            raise ValueError(f"machine {self.name}: no rate for any of {', '.join(keys)}; add one under [rates]")
        return row[0] * 1e12, row[1] * 1e12

    def crowd(self, ranks: int) -> float:
        """How many times as long work takes while so many ranks compute at once."""
        return max(1.0, min(ranks, self.gpus) / self.cores) if self.cores else 1.0

    def flops(self, itemsize: int, ranks: int) -> float:
        """Flops a second of a rank's attention forward, of so many that compute, on numbers of so many bytes."""
        return self.rate((BY_BYTES[itemsize], "float32"))[0] / self.crowd(ranks)

    def swap(self, near: float, far: float, ranks: int) -> float:
        """Seconds in which each of so many ranks sends some bytes within its host, and some to others, one by one."""
        senders = min(self.gpus, ranks)
        return float(self.inside.seconds(near, senders=senders) + self.between.seconds(far, senders=senders))

    @cached_property
    def text(self) -> str:
        """Every number; `of_text` is the inverse."""
        return dumps(vars(self) | {"inside": vars(self.inside), "between": vars(self.between)})

    @cached_property
    def label(self) -> str:
        """What ranks compare."""
        return f"{self.name} #{zlib.crc32(self.text.encode()):08x}"

    def differs(self, chip: str) -> str | None:
        """Why this description is not one of a device with that name, if it is not."""
        if not self.chip or self.chip.lower() in chip.lower():
            return None
        return f"the description {self.name!r} is of {self.chip}, and this machine has {chip}"


TABLES = ("inside", "between", "rates")
NUMBERS = {int: "a whole number", float: "a number", PAIR: "two numbers", tuple[int, ...]: "two whole numbers"}


def of_table(given: Any, kind: type[Value], where: str) -> dict[str, Any]:
    """The values of a table, if all are known, none is missing, and each has its type."""
    known = fields(kind)
    if not isinstance(given, dict):
        raise ValueError(f"{where}: expected a table of numbers, got {given!r}")
    for name in given:
        if name not in known:
            raise ValueError(f"{where}: no such key {name!r}{meant(name, known)}")
    if missing := [name for name, f in known.items() if name not in given and f.default is MISSING]:
        raise ValueError(f"{where}: {', '.join(missing)} missing; a description needs them")
    return {name: value_of(name, value, known[name].type, where) for name, value in given.items()}


def value_of(name: str, value: Any, kind: Any, where: str) -> Any:
    """The value of a field of this type: text, a number, two numbers, a link, or the table of rates."""
    if kind is Link:
        return Link(**of_table(value, Link, f"{where} [{name}]"))
    if kind is RATES:
        rows = value.items() if isinstance(value, dict) else ()
        return {key: value_of(key, row, PAIR, f"{where} [rates]") for key, row in rows}
    if kind is str:
        right, expected = isinstance(value, str) and value.isprintable(), "a line of text"
    else:
        positive = kind is int or name in ("memory", "bandwidth") or where.endswith("[rates]")
        types, pair = (int,) if int in (kind, *get_args(kind)) else (int, float), bool(get_args(kind))
        numbers = value if pair and isinstance(value, list) else [value]
        some = [type(x) in types and 0 <= x < inf and not (positive and x == 0) for x in numbers]
        right = len(numbers) == 1 + pair and all(some)
        expected = f"{NUMBERS[kind]} {'above' if positive else 'from'} 0"
    if not right:
        raise ValueError(f"{where}: {name}={value!r}: expected {expected}")
    return tuple(value) if isinstance(value, list) else value


def of_dict(given: dict[str, Any], where: str) -> Machine:
    """The machine of these values."""
    machine = Machine(**of_table(given, Machine, where))
    if machine.device not in DEVICES:
        raise ValueError(f"{where}: device={machine.device!r}: choose one of {', '.join(DEVICES)}")
    return machine


def of_text(text: str) -> Machine:
    return of_dict({name: value for name, value in loads(text).items() if value not in ("", [])}, "text")


def of_file(path: Path, after: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The values of a TOML file: `like` names another description, of which it gives what differs."""
    if path in after:
        raise ValueError(f"{path}: like goes in a circle, {' -> '.join(map(str, after))}; one must give all values")
    try:
        given = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not TOML: {error}") from None
    if "like" not in given:
        return given
    base = of_file(path_of(given.pop("like"), f"{path}: like"), (*after, path))
    both = {n: {**base[n], **given[n]} for n in TABLES if isinstance(given.get(n), dict) and n in base}
    return {**base, **given, **both}


def shipped() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


@cache
def assumed(device: str) -> Machine:
    """The shipped description that is taken for a device of which nothing else is known."""
    return load(DEVICES.get(device, "cpu"))


@lru_cache(maxsize=64)
def read(path: Path, changed: int) -> Machine:
    return of_dict(of_file(path), str(path))


def load(machine: "str | Path | Machine") -> Machine:
    """The description of this name (`ringattn/plans/machines/`), or in this file."""
    if isinstance(machine, Machine):
        return machine
    path = path_of(machine)
    return read(path, path.stat().st_mtime_ns)


def path_of(machine: Any, what: str = "machine") -> Path:
    """The file of a description, by its name or path."""
    names = shipped()
    if not isinstance(machine, str | Path):
        raise ValueError(f"{what}={machine!r}: a name ({', '.join(names)}) or the path of a description")
    path = SHIPPED / f"{machine}.toml" if str(machine) in names else Path(machine)
    if not path.is_file():
        raise ValueError(f"{what}={str(machine)!r}: no such description or file{meant(str(machine), names)}")
    return path


def meant(word: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, names, 1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(names)}"


def chip_here(device: str) -> str | None:
    """The name of this machine's GPU, if torch is imported and finds one."""
    torch = sys.modules.get("torch")
    return torch.cuda.get_device_name() if device == "cuda" and torch and torch.cuda.is_available() else None


def calibrated() -> Machine | None:
    """What `ringattn calibrate` wrote here, if it did and this version can read it."""
    try:
        return load(OWN) if OWN.is_file() else None
    except ValueError as error:
        warnings.warn(f"ignored until `ringattn calibrate` writes it anew: {error}", stacklevel=2)
        return None


def of_device(device: str, chip: str | None = None) -> Machine:
    """What is known of the ranks' device: calibrated here, or else the shipped description of its chip."""
    chip = chip or chip_here(device)
    own = calibrated()
    if own and own.device == device and (chip is None or not own.differs(chip)):
        return own
    named = [load(name) for name in shipped()] if chip else []
    alike = [m for m in named if m.device == device and m.chip and not m.differs(chip or "")]
    return max(alike, key=lambda m: len(m.chip)) if alike else assumed(device)


def write(machine: Machine, path: Path) -> None:
    """A description as a file that `load` reads; text, numbers and lists of JSON are TOML too."""
    values = {name: getattr(machine, name) for name in fields(Machine)}
    lines = [f"{name} = {dumps(x)}" for name, x in values.items() if name not in TABLES and x not in ("", ())]
    for name in TABLES:
        table = values[name] if name == "rates" else vars(values[name])
        lines += ["", f"[{name}]", *(f"{dumps(key)} = {dumps(row)}" for key, row in table.items())]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
