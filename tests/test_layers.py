"""Who may import whom: plain Python below, kernels and comms apart, frameworks above, launch on top."""

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("masks", "layouts", "steps", "plans", "check")  # plain Python; each may import those before it
ALSO = {"plans": ["ringattn.kernels", "ringattn.comms.axis"], "check": ["ringattn.kernels.arrays"]}


def imports(path: Path) -> set[str]:
    """Every module that a file names in an import, wherever the import stands."""
    results = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            results |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            results |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.ImportFrom):
            results.add("relative import")
    return results


def ours(path: Path) -> set[str]:
    return {name for name in imports(path) if name.split(".")[0] in ("ringattn", "relative import")}


def python_files(folder: str) -> list[Path]:
    return sorted(
        p for p in [*(ROOT / folder).rglob("*.py"), ROOT / folder] if p.suffix == ".py" and not p.is_symlink()
    )


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def within(name: str, *allowed: str) -> bool:
    return any(name == a or name.startswith(f"{a}.") for a in allowed)


FRAMEWORKS = "torch", "triton", "jax"
ROOM = "ringattn.{}".format
ALLOWED = {  # folder: the modules of ours that it may import, and what else it must not
    "comms": ([ROOM("comms")], ()),
    "kernels": (["ringattn", ROOM("kernels"), ROOM("masks")], ()),
    **{
        f"ringattn/{room}": (["ringattn", *map(ROOM, ROOMS[: i + 1]), *ALSO.get(room, [])], FRAMEWORKS)
        for i, room in enumerate(ROOMS)
    },
}
FORBIDDEN = {  # module: the folders that must not import it
    "ringattn.launch": ("ringattn", "comms", "kernels", "conf"),
    "tests": ("ringattn", "comms", "kernels", "conf", "launch"),
    "ringattn.compat": ("ringattn", "launch"),
    "ringattn.models": tuple(
        f"ringattn/{room}" for room in (*ROOMS, "torch", "jax", "api.py", "choosing.py", "serving.py")
    ),
    "ringattn.jax": ("ringattn/torch",),
    "ringattn.torch": ("ringattn/jax",),
}
EXCEPT = {"ringattn/__main__.py", "ringattn/masks/segment_ids.py"}  # starts a command; takes arrays of JAX


@pytest.mark.parametrize("folder", ALLOWED)
def test_rooms_import_only_those_below_them(folder):
    allowed, frameworks = ALLOWED[folder]
    for path in python_files(folder):
        wrong = [n for n in ours(path) if not any(n == a or (within(n, a) and a != "ringattn") for a in allowed)]
        wrong += [n for n in imports(path) if within(n, *frameworks)] * (name_of(path) not in EXCEPT)
        assert not wrong, f"{path} imports {wrong}"


@pytest.mark.parametrize("module", FORBIDDEN)
def test_nobody_below_imports_what_stands_above(module):
    for path in (p for folder in FORBIDDEN[module] for p in python_files(folder)):
        mine = within(name_of(path).removesuffix(".py").replace("/", "."), module) or name_of(path) in EXCEPT
        assert mine or not [n for n in imports(path) if within(n, module)], path


def test_configuration_and_environment_stop_at_launch():
    for folder in ("ringattn", "comms", "kernels"):
        for path in python_files(folder):
            text = path.read_text()
            if path.name == "fa4.py":  # it takes some settings from the environment alone
                continue
            assert "os.environ" not in text and "getenv" not in text, f"{path} reads the environment"


def test_links_make_one_import_namespace():
    for name in ("comms", "kernels", "launch", "conf"):
        link = ROOT / "ringattn" / name
        assert link.is_symlink() and link.resolve() == ROOT / name


def test_import_is_quick_and_brings_nothing_heavy():
    heavy = ["torch", "jax", "triton", "hydra", "ray", "transformers", "matplotlib"]
    code = f"import sys, ringattn; ringattn.__version__; print([m for m in {heavy} if m in sys.modules])"
    best = 9.0
    for _ in range(3):
        start = time.perf_counter()
        out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        best = min(best, time.perf_counter() - start)
        assert out.strip() == "[]"
    assert best < 0.3, f"import ringattn took {best:.2f} s"


def test_every_public_name_can_be_had():
    import ringattn

    assert sorted(ringattn.__all__) == sorted(ringattn.PUBLIC)
    assert {name for name in dir(ringattn) if not name.startswith("__")} == {*ringattn.__all__}
    for name in ringattn.__all__:
        assert getattr(ringattn, name) is not None
    assert not hasattr(ringattn, "atention")
