"""What the shell may complete after `ringattn`: commands, suites, and the keys of each.

eval "$(ringattn train --completion)"      # in ~/.bashrc; in zsh after: autoload bashcompinit && bashcompinit
"""

import ast
import sys
from pathlib import Path

from ringattn.conf import schema
from ringattn.launch import bench, words

SCRIPT = """_ringattn() {{
    mapfile -t COMPREPLY < <({python} -m ringattn.launch.complete "${{COMP_LINE:0:COMP_POINT}}" 2>/dev/null)
}}
complete -o nospace -o default -F _ringattn ringattn"""


def after(line: str) -> list[str]:
    """What the last word of a command line that begins with `ringattn` may become."""
    *before, word = [*line.split(), ""][1:] if line[-1:].isspace() else line.split()[1:] or [""]
    if before in ([], ["bench"]):
        ends = [f"{name} " for name in (bench.SUITES if before else words.COMMANDS)]
    else:
        ends = [f"{key}=" for key in keys(".".join(before[: 1 + (before[0] == "bench")]))]
    return [end for end in ends if end.startswith(word)]


def keys(command: str) -> list[str]:
    """The keys of a command, read from its source, for importing it takes seconds; none if there is no such command."""
    if command == "train":
        return [*schema.GROUPS, *(name for name, _ in schema.every_key())]
    path = Path(words.__file__).parents[1] / words.module_of(command).removeprefix("ringattn.").replace(".", "/")
    tree = ast.parse(path.with_suffix(".py").read_text() if path.with_suffix(".py").is_file() else "")
    kinds = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Options")
    fields = [field for kind in kinds for field in kind.body if isinstance(field, ast.AnnAssign)]
    return [field.target.id for field in fields if isinstance(field.target, ast.Name)]


if __name__ == "__main__":
    print("\n".join(after(sys.argv[1])))
