"""The signatures of reference/api.md: `python docs/signatures.py` writes them anew, and a test compares.

A comment `<!-- ::: ringattn.choosing.plan -->`, up to `<!-- end -->`, holds the heading, signature and first paragraph
that code hosts show. hooks.py gives the site mkdocstrings' whole description in their place.
"""

import dataclasses
import inspect
import re
import textwrap
from importlib import import_module
from pathlib import Path
from typing import Any

API = Path(__file__).parent / "reference" / "api.md"
BLOCK = re.compile(r"<!-- ::: ([\w.]+)((?: \w+)*) -->\n.*?<!-- end -->", re.DOTALL)
WIDTH = 110


def public_name(path: str) -> str:
    """What users call an object: ra.plan, ra.hf.prepare, ra.nn.Attention."""
    import ringattn as ra

    name = path.rpartition(".")[2]
    rooms = {"ra": ra.__all__, "ra.hf": ra.hf.__all__, "ra.nn": dir(ra.nn)}
    return next(f"{room}.{name}" for room, names in rooms.items() if name in names)


def signature_of(name: str, obj: Any) -> str:
    """`name(...)` as a call: parameters and defaults, without types, on as many lines as it takes."""
    parameters = list(inspect.signature(obj).parameters.values())
    if dataclasses.is_dataclass(obj) and all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        parts = [f"{f.name}={f.default!r}" for f in dataclasses.fields(obj) if f.init]  # its constructor passes all on
    else:
        bare = inspect.Signature([p.replace(annotation=p.empty) for p in parameters if p.name != "self"])
        parts = re.split(r", (?![^(\[{]*[)\]}])", re.sub(r"<[^>]*>", "...", str(bare))[1:-1])
    line = f"{name}({', '.join(parts)})".replace("'", '"')
    if len(line) <= WIDTH:
        return line
    inside = textwrap.fill(line[len(name) + 1 : -1] + ",", WIDTH, initial_indent="    ", subsequent_indent="    ")
    return f"{name}(\n{inside}\n)"


def block(path: str, options: str) -> str:
    """What stands in api.md for an object."""
    module, _, last = path.rpartition(".")
    obj, name = getattr(import_module(module), last), public_name(path)
    calls = [signature_of(name, obj)]
    for member in re.findall(r"\w+", options):
        bound = getattr(obj, member)
        owner = name if inspect.ismethod(bound) else re.findall("[A-Z][a-z]+", last)[-1].lower()
        calls.append(signature_of(f"{owner}.{member}", bound))
    about = (inspect.getdoc(obj) or "").split("\n\n")[0]
    text = "\n".join(calls)
    return f"<!-- ::: {path}{options} -->\n### {name}\n\n```text\n{text}\n```\n\n{about}\n<!-- end -->"


def written(text: str) -> str:
    """The page with every signature as the code has it."""
    return BLOCK.sub(lambda match: block(match[1], match[2]), text)


if __name__ == "__main__":
    API.write_text(written(API.read_text()))
