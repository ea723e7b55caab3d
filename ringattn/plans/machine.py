"""A description of a machine: what a GPU computes, what its memory holds, and how fast the links are.

A description is a small TOML file (`machines/`, or your own): SI units, bytes and seconds, rates in TFLOP/s.
`load` reads one by its name or path, and names what is missing, misspelt or absurd. Plans and the simulator take
nothing else: no number of a machine stands in code.
"""

import difflib
import sys
import tomllib
import zlib
from collections.abc import Mapping
from dataclasses import MISSING, field
from functools import cache, cached_property, lru_cache
from json import dumps, loads
from pathlib import Path
from typing import Any

import numpy as np

from ringattn.masks.values import Value, fields

SHIPPED = Path(__file__).parent / "machines"
OWN = Path.home() / ".cache" / "ringattn" / "machine.toml"  # written by `ringattn calibrate`
DEVICES = {"cuda": "h200", "tpu": "v6e", "cpu": "cpu"}  # what is assumed of a device that is not known better
ITEMS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # bytes
BY_BYTES = {8: "float64", 4: "float32", 2: "bfloat16"}


class Link(Value):
    """`bandwidth` is bytes a second each way, `latency` seconds a transfer; `sharing` GPUs of a host use one link."""

    bandwidth: float
    latency: float
    sharing: int = 1

    def transfer(self, nbytes: Any, senders: Any = 1) -> Any:
        """Seconds, without the latency, while so many GPUs of the host send."""
        return nbytes * (np.minimum(senders, self.sharing) / self.bandwidth)


class Machine(Value):
    """Hosts with equally many GPUs (or TPU slices with their chips), of one kind.

    rates      TFLOP/s forward and backward, by "kernel/mask/width" as in `kernels/rates.py`, by "kernel/dtype", or by
               dtype for kernels without a row
    half       queries x heads of a rank with which a kernel reaches half of its rate, forward and backward
    launch     seconds that a step takes beside its work, forward and backward
    start      seconds until a single call computes, forward and backward; calls in a row hide them
    least      seconds that a single call over ranks takes at least, forward and backward: the host launches it
    exchange   seconds that the host takes for the transfers of a pass which nothing hides: heads, or all keys
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
    rates: Mapping[str, tuple[float, float]] = field(hash=False)
    source: str
    chip: str = ""
    arch: tuple[int, ...] = ()
    products: float = 0.0
    half: tuple[float, ...] = (0.0, 0.0)
    launch: tuple[float, ...] = (0.0, 0.0)
    start: tuple[float, ...] = (0.0, 0.0)
    least: tuple[float, ...] = (0.0, 0.0)
    exchange: tuple[float, ...] = (0.0, 0.0)
    room: float = 0.0
    group: tuple[float, ...] = (0.0, 0.0)
    cores: float = 0.0
    path: str = field(default="", compare=False)

    def rate(self, keys: tuple[str, ...]) -> tuple[float, float]:
        """Flops a second, forward and backward, of the first of these rows that there is."""
        row = next((self.rates[key] for key in keys if key in self.rates), None)
        if row is None:
            raise ValueError(f"machine {self.name}: no rate for any of {', '.join(keys)}; add one under [rates]")
        return row[0] * 1e12, row[1] * 1e12

    def single(self, seconds: float, back: bool) -> float:
        """Seconds of a single pass over ranks that takes so many among others."""
        return max(seconds + self.start[back], self.least[back])

    def crowd(self, ranks: int) -> float:
        """How many times as long work takes while so many ranks compute at once."""
        return max(1.0, min(ranks, self.gpus) / self.cores) if self.cores else 1.0

    def flops(self, itemsize: int, ranks: int) -> float:
        """Flops a second of a rank's attention forward, of so many that compute, on numbers of so many bytes."""
        return self.rate((BY_BYTES[itemsize], "float32"))[0] / self.crowd(ranks)

    def blocks_at_once(self, block: int) -> int:
        """How many blocks of `block` bytes a step may bring."""
        return max(1, int(self.room // max(1, block)))

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
LIMITS = {  # the least and the most that is plausible; both are given in the error
    "gpus": (1, 65536), "memory": (2**26, 2**46), "bandwidth": (1e8, 1e15), "products": (1e-4, 1e6),
    "half": (0, 1e9), "launch": (0, 1.0), "room": (0, 2**46), "latency": (0, 10.0), "sharing": (1, 4096),
    "start": (0, 10.0), "least": (0, 10.0), "exchange": (0, 10.0), "row": (1e-5, 1e5), "arch": (0, 1000),
    "group": (0, 1e14), "cores": (0, 65536),
}  # fmt: skip
LINK_LIMITS = LIMITS | {"bandwidth": (1e3, 1e14)}


def of_table(given: Any, type_: Any, where: str, limits: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a table, if all are known, none is missing, and their numbers are plausible."""
    if not isinstance(given, dict):
        raise ValueError(f"{where}: expected a table of numbers, got {given!r}")
    of_type = {name: f for name, f in fields(type_).items() if name != "path"}
    for name in given:
        if name not in of_type:
            close = difflib.get_close_matches(name, of_type, 1)
            raise ValueError(f"{where}: no such key {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    if missing := [n for n, f in of_type.items() if n not in given and f.default is MISSING]:
        raise ValueError(f"{where}: {', '.join(missing)} missing; a description needs them")
    return {name: value_of(value, name, where, limits) for name, value in given.items()}


def value_of(value: Any, name: str, where: str, limits: Mapping[str, Any]) -> Any:
    if name in TABLES:
        return value
    if name in ("name", "device", "source", "chip"):
        if not isinstance(value, str) or not value.isprintable():
            raise ValueError(f"{where}: {name}={value!r}: expected a line of text")
        return value
    numbers = tuple(value) if isinstance(value, list) else (value,)
    low, high = limits[name]
    whole = name in ("gpus", "sharing", "arch")
    for x in numbers:
        if isinstance(x, bool) or not isinstance(x, int if whole else (int, float)) or not low <= x <= high:
            raise ValueError(f"{where}: {name}={value!r}: expected {'a whole number' if whole else 'a number'} "
                             f"from {low:g} to {high:g}")  # fmt: skip
    pairs = {"half": 2, "launch": 2, "start": 2, "least": 2, "exchange": 2, "row": 2, "arch": 2, "group": 2}.get(name)
    if isinstance(value, list) != (pairs is not None) or (pairs is not None and len(numbers) != pairs):
        raise ValueError(f"{where}: {name}={value!r}: expected {'two numbers' if pairs else 'one number'}")
    return numbers if pairs else value


def of_dict(given: dict[str, Any], where: str) -> Machine:
    """The machine that a file describes: `like` names another description, of which it gives what differs."""
    path, passed = where, [where]
    while "like" in given:
        try:
            path = str(path_of(given["like"]))
            given = over(given, parsed(Path(path)))
        except ValueError as error:
            raise ValueError(f"{passed[-1]}: like = {given['like']!r}: {error}") from None
        if path in passed:
            raise ValueError(
                f"{where}: like goes in a circle, {' -> '.join([*passed, path])}; one must give all values"
            )
        passed.append(path)
    values = of_table(given, Machine, where, LIMITS)
    for name in ("inside", "between"):
        values[name] = Link(**of_table(values[name], Link, f"{where} [{name}]", LINK_LIMITS))
    rows = values["rates"]
    if not isinstance(rows, dict) or not rows:
        raise ValueError(f"{where}: [rates] needs a row for a dtype, as in float32 = [20, 15]")
    values["rates"] = {key: value_of(row, "row", f"{where} [rates] {key}", LIMITS) for key, row in rows.items()}
    if values["device"] not in DEVICES:
        raise ValueError(f"{where}: device={values['device']!r}: choose one of {', '.join(DEVICES)}")
    return Machine(**values, path=where)


def of_text(text: str) -> Machine:
    """The machine with this text."""
    given = {name: value for name, value in loads(text).items() if value not in ("", [])}
    return of_dict(given, given.pop("path", ""))


def over(given: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """The values of a file on top of those of another one, table by table."""
    given = {name: x for name, x in given.items() if name != "like"}  # that of the base stays
    both = {
        name: {**base[name], **given[name]} for name in TABLES if isinstance(given.get(name), dict) and name in base
    }
    return {**base, **given, **both}


def shipped() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


@cache
def assumed(device: str) -> Machine:
    """The shipped description that is taken for a device of which nothing else is known."""
    return load(DEVICES.get(device, "cpu"))


@lru_cache(maxsize=64)
def read(path: Path, changed: int) -> Machine:
    return of_dict(parsed(path), str(path))


def parsed(path: Path) -> dict[str, Any]:
    """The values of a TOML file."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not TOML: {error}") from None


def load(machine: "str | Path | Machine") -> Machine:
    """The description of this name (`ringattn/plans/machines/`), or in this file."""
    if isinstance(machine, Machine):
        return machine
    path = path_of(machine)
    return read(path, path.stat().st_mtime_ns)


def path_of(machine: Any) -> Path:
    """The file of a description, by its name or path."""
    if not isinstance(machine, str | Path):
        raise ValueError(f"machine={machine!r}: a name ({', '.join(shipped())}) or the path of a description")
    path = SHIPPED / f"{machine}.toml" if str(machine) in shipped() else Path(machine)
    if not path.is_file():
        close = difflib.get_close_matches(str(machine), shipped(), 1)
        raise ValueError(
            f"machine={str(machine)!r}: no such description or file"
            + (f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(shipped())}")
        )
    return path


def chip_here(device: str) -> str | None:
    """The name of this machine's GPU, if torch is imported and finds one."""
    torch = sys.modules.get("torch")
    return torch.cuda.get_device_name() if device == "cuda" and torch and torch.cuda.is_available() else None


def of_device(device: str, chip: str | None = None) -> Machine:
    """What is known of the ranks' device: calibrated here, or else the shipped description of its chip."""
    chip = chip or chip_here(device)
    if OWN.is_file():
        own = load(OWN)
        if own.device == device and (chip is None or not own.differs(chip)):
            return own
    named = [load(name) for name in shipped()] if chip else []
    alike = [m for m in named if m.device == device and m.chip and not m.differs(chip or "")]
    return max(alike, key=lambda m: len(m.chip)) if alike else assumed(device)


def write(machine: Machine, path: Path) -> None:
    """A description as a file that `load` reads."""

    def shown(value: Any) -> str:
        if isinstance(value, str):
            return '"' + value.replace("\\", "/").replace('"', "'") + '"'
        if isinstance(value, tuple):
            return f"[{', '.join(map(shown, value))}]"
        return repr(value)

    flat = {n: getattr(machine, n) for n in fields(Machine) if n not in (*TABLES, "path")}
    lines = [f"{name} = {shown(value)}" for name, value in flat.items() if value not in ("", ())]
    for table in ("inside", "between"):
        lines += ["", f"[{table}]", *(f"{n} = {shown(getattr(getattr(machine, table), n))}" for n in fields(Link))]
    lines += ["", "[rates]", *(f'"{key}" = {shown(row)}' for key, row in machine.rates.items())]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
