"""What the shell may complete after `ringattn train`: groups with their files, keys, and the values that are few.

eval "$(ringattn train --completion)"      # in ~/.bashrc; in zsh after: autoload bashcompinit && bashcompinit
"""

import sys

from ringattn.conf import schema
from ringattn.conf.compose import files

SCRIPT = """_ringattn() {{
    local line="${{COMP_LINE:0:COMP_POINT}}"
    local word="${{line##* }}"
    [[ $line == *" train "* ]] || return
    mapfile -t COMPREPLY < <({python} -m ringattn.conf.complete "$word" 2>/dev/null)
    if [[ $word == *=* && $COMP_WORDBREAKS == *=* ]]; then COMPREPLY=("${{COMPREPLY[@]#*=}}"); fi
}}
complete -o nospace -o default -F _ringattn ringattn"""


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
        return files(name)
    kinds = {n: f.type for n, f in schema.every_key()}
    few = ("true", "false") if kinds.get(name) is bool else schema.CHOICES.get(name, ())
    return ["null" if v is None else v for v in few]


if __name__ == "__main__":
    print("\n".join(candidates(sys.argv[1] if len(sys.argv) > 1 else "")))
