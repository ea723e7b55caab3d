"""What the shell may complete after `ringattn`: commands, suites and their keys; of train also groups and few values.

eval "$(ringattn train --completion)"      # in ~/.bashrc; in zsh after: autoload bashcompinit && bashcompinit
"""

import ast
import sys
from pathlib import Path

from ringattn.conf import schema
from ringattn.launch import bench, words

SCRIPT = """_ringattn() {{
    local line="${{COMP_LINE:0:COMP_POINT}}"
    local word="${{line##* }}"
    mapfile -t COMPREPLY < <({python} -m ringattn.launch.complete "$line" 2>/dev/null)
    if [[ $word == *=* && $COMP_WORDBREAKS == *=* ]]; then COMPREPLY=("${{COMPREPLY[@]#*=}}"); fi
}}
complete -o nospace -o default -F _ringattn ringattn"""


def after(line: str) -> list[str]:
    """What the last word of a command line that begins with `ringattn` may become."""
    *before, word = [*line.split(), ""][1:] if line[-1:].isspace() else line.split()[1:] or [""]
    if before[:1] == ["train"]:
        return candidates(word)
    if before in ([], ["bench"]):
        return [f"{name} " for name in (bench.SUITES if before else words.COMMANDS) if name.startswith(word)]
    own = before[0] != "bench"
    if before[0 if own else 1] not in (words.COMMANDS if own else bench.SUITES):
        return []
    return [f"{key}=" for key in options(before[0] if own else f"bench.{before[1]}") if key.startswith(word)]


def options(command: str) -> list[str]:
    """The keys of a command, read from its source, for importing it takes seconds."""
    folder, _, name = words.module_of(command).removeprefix("ringattn.launch.").rpartition(".")
    tree = ast.parse((Path(words.__file__).parent / folder.replace(".", "/") / f"{name}.py").read_text())
    kinds = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Options"]
    return [f.target.id for f in kinds[0].body if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)]


def candidates(word: str) -> list[str]:
    """Every word that begins so; up to the next dot of a key's name, or the sign before a value."""
    plus = word[: len(word) - len(word.lstrip("+~"))]
    name, equals, value = word[len(plus) :].partition("=")
    if equals:
        return [f"{plus}{name}={v}" for v in values(name) if v.startswith(value)]
    names = [*schema.GROUPS, *(n for n, _ in schema.every_key())]
    dots = name.count(".")
    heads = [".".join(n.split(".")[: dots + 1]) for n in names]
    ends = [f"{h}=" if h in names else f"{h}." for h in heads]
    ends += [f"{g}." for g in schema.GROUPS if any(n.startswith(f"{g}.") for n in names)]
    return sorted({plus + e for e in ends if e.startswith(name)})


def values(name: str) -> list[str]:
    if name in schema.GROUPS:
        return schema.files(name)
    field = dict(schema.every_key()).get(name)
    if field is None:
        return []
    return ["true", "false"] if field.type is bool else [*field.metadata["among"], *["null"] * (field.default is None)]


if __name__ == "__main__":
    print("\n".join(after(sys.argv[1])))
