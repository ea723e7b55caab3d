"""The command line: every command explains itself, a wrong word is one sentence and exit status 2, results are kept."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import ringattn as ra
from ringattn.launch import bench, words
from ringattn.launch.commands import doctor
from ringattn.launch.verify import oracle
from tests.cases import relative_error
from tests.launched import launched

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def start(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run([*argv], env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_without_words_every_command_is_listed(capsys):
    ended = start(sys.executable, "-m", "ringattn")
    assert ended.returncode == 0
    assert all(f"  {name} " in ended.stdout for name in words.COMMANDS)
    assert words.main(["--version"]) == 0 and capsys.readouterr().out == f"ringattn {ra.__version__}\n"


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("", name="matplotlib.pyplot"), ImportError("no libfoo", name="matplotlib")]
)
def test_a_package_that_cannot_be_imported_is_one_sentence(error, capsys, monkeypatch):
    def broken(name):
        raise error

    monkeypatch.setattr(words, "import_module", broken)
    assert words.main(["plot", "rows.jsonl"]) == 2 and "pip install 'ringattn[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize("name", [*words.COMMANDS, *(f"bench {suite}" for suite in bench.SUITES)])
def test_every_command_and_benchmark_has_help(name, capsys):
    assert words.main([*name.split(), "--help"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"usage: ringattn {name}") and len(output.splitlines()) > 4 and "=None" not in output
    assert "  out=null " in output or not name.startswith("bench ")


LINES = [
    {"case": "causal 8K", "impl": impl, "mode": mode, "ms": 2.0, "tflops": tflops, "commit": "abc", "device": "H200"}
    for impl, mode, tflops in [("ours", "fwd", 600.0), ("cudnn", "fwd", 599), ("ours", "bwd", 500.0)]
]


def written(path: Path, lines: list) -> str:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, errors="surrogateescape")
    return str(path)


FILES = {
    "rows": LINES, "empty": [], "torn": ['{"ms": 1}', "{ms"], "apples": [{"case": "a", "apples": 3}],
    "run/metrics.jsonl": [],
}  # fmt: skip


@pytest.mark.parametrize(
    "argv, output",
    [
        ("plann", "no command 'plann'; did you mean 'plan'?"),
        ("plan seqlen=8", "no option 'seqlen'; did you mean 'seq_len'?"),
        ("plan seq_len=many", "seq_len=many: expected a whole number"),
        ("plan device=gpu", "choose one of cuda, cpu, tpu"),
        ("plan ring=4 hosts=3", "hosts=3 do not divide 4 ranks"),
        ("plan seq_len=10 docs=4,7", "docs= holds 11 tokens, more than seq_len=10"),
        ("verify backend=mpi", "choose one of threads, jax"),
        ("doctor timeout=soon", "timeout=soon: expected a number"),
        ("plan ring=100000", "100000 ranks; a plan is made for 65536 at most"),
        ("plan seq_len=5 seq_len=6", "seq_len is given twice"),
        ("plan --seq-len=6", "no option '--seq-len'; did you mean 'seq_len'?"),
        ("bench ring device=cpu ranks=2 tokens=64 mask=prefix:3:9", "mask=prefix:3:9: choose causal"),
        ("bench kernel", "no suite 'kernel'; did you mean 'kernels'?"),
        ("bench ring device=cpu ranks=9999 tokens=64", "9999 ranks, each a process here"),
        ("bench ring device=cpu ranks=2 tokens=64 out={0}/none/a", "out={0}/none/a"),  # not after all is measured
        ("plot {0}/rows out={0}/none/a.svg", "out={0}/none/a.svg"),
        ("plot nowhere.jsonl", "nowhere.jsonl is no file"),
        ("plot {0}/run", "did you mean {0}/run/metrics.jsonl?"),
        ("plot {0}/empty", "has no lines"),
        ("plot {0}/torn", "line 2 is not JSON"),
        ("plot {0}/apples", "give metric= one of apples"),
    ],
)
def test_a_wrong_word_or_file_is_one_sentence_before_anything_is_done(argv, output, tmp_path, capsys):
    if argv.startswith("plot"):
        pytest.importorskip("matplotlib")
    for name, lines in FILES.items():
        written(tmp_path / name, lines)
    assert words.main(argv.format(tmp_path).split()) == 2
    printed = capsys.readouterr()
    assert output.format(tmp_path) in printed.err
    assert not printed.out


@pytest.mark.slow
@pytest.mark.parametrize("argv", [("inference", "chunk=32"), ("ring", "rule=gated", "scan=ring")], ids=" ".join)
def test_a_benchmark_prints_each_row_as_it_comes(argv):
    small = ("heads=4", "kv_heads=2", "device=cpu", "tokens=64", "ranks=2", "repeats=1")
    ended = start(sys.executable, "-m", "ringattn", "bench", *argv, *small)
    assert 0 < ended.stderr.count("tokens=64") == len(ended.stdout.splitlines()) - 1, ended.stderr


FOUR = "seq_len=8192 ring=4 layout=zigzag"


@pytest.mark.parametrize(
    "argv, output",
    [
        (FOUR, "blocks come by route direct, over symmetric memory; in backward gradients in"),
        (FOUR, "CUDA graphs: a call that repeats is captured in its third run\n"),
        (f"{FOUR} hosts=2", "blocks come by route levels, over nccl"),
        (f"{FOUR} strategy=gather groups=2", "heads exchanged in 2 groups ("),
        (f"{FOUR} explain=call rank=1", "ring rank 1: batch 1, 32 query and 8 key heads"),
        (f"{FOUR} explain=call device=tpu", "  step 2: keys of rank r - 2; meanwhile keys go to rank r + 1 and gradi"),
        ("ring=512 strategy=ring docs=60000,70000", "  rank  511 "),  # two minutes if each pair of ranks is counted
    ],
)
def test_plan_shows_what_is_asked_for_in_seconds(argv, output, capsys):
    start = time.perf_counter()
    assert words.main(["plan", *argv.split()]) == 0
    assert time.perf_counter() - start < 20 and output in capsys.readouterr().out


def test_plan_draws_who_holds_documents_of_a_mix(capsys):
    asked = ["seq_len=65536", "ring=8", "device=cpu", "docs=lognormal:1024:1.4", "layout=balanced"]
    assert words.main(["plan", *asked]) == 0
    output = capsys.readouterr().out
    rows = [line for line in output.split("who holds what")[1].splitlines() if line.startswith("  rank")]
    assert len(rows) == 8 and all(0.95 <= float(row.split()[2]) <= 1.03 for row in rows)
    assert all(sum(char in ".:#" for char in row[28:]) <= 40 for row in rows)  # a few ranges each


def test_verify_passes_on_threads_and_fails_where_all_is_refused(capsys):
    assert words.main(["verify", "random=12", "ranks=2", "seed=200"]) == 0
    output = capsys.readouterr().out
    assert "FAIL" not in output and all(f"{kind} " in output for kind in ("attention", "cache", "linear"))
    assert words.main(["verify", "random=1", "seed=7172"]) == 0  # no state depends on an input: all documents are empty
    assert words.main(["verify", "random=3", "cases=zigzag", "kernel=chunkwise"]) == 0
    assert "attention " not in capsys.readouterr().out
    assert words.main(["verify", "random=3", "kernel=fa4"]) == 1
    assert "0 of 3 random calls pass, 3 are refused" in capsys.readouterr().out


def test_verify_joins_what_a_cache_gives_on_explicit_axes():
    pytest.importorskip("jax")
    assert words.main(["verify", "random=1", "seed=700045", "backend=jax"]) == 0


@pytest.mark.parametrize(
    ("call", "calls", "line"),
    [
        ("attention", 6, "cases=attention- seed=3 ranks=2 dtype=float32 kernel=tiled"),
        ("attention", 2, "cases=attention- seed=80 backend=jax"),
        pytest.param("linear_attention", 2, "cases=linear- seed=80 backend=jax", marks=pytest.mark.slow),
        pytest.param("prefill", 4, "cases=cache- seed=80 backend=jax", marks=pytest.mark.slow),
    ],
)
def test_a_call_that_is_wrong_is_found_and_repeated_by_the_line_it_prints(call, calls, line, capsys, monkeypatch):
    _, _, *kept = given = line.split()
    if "backend=jax" in given:
        pytest.importorskip("jax")

    def off(*inputs, **options):
        out, other = exact(*inputs, **options)
        here = "backend=jax" in given or inputs[3].place != (0, 0)  # not the first rank
        return out * (1 + 1e-4 * here), other  # float32 and float64 see it, so one of the calls must be of these

    exact = getattr(ra, call)
    with monkeypatch.context() as patched:
        patched.setattr(ra, call, off)
        assert words.main(["verify", f"random={calls}", *given]) == 1
        again = next(row for row in capsys.readouterr().out.splitlines() if row.startswith("ringattn verify ")).split()
        assert again[2] == "random=1" and {*kept} <= {*again}
        assert words.main(again[1:]) == 1
        assert "out is off by" in capsys.readouterr().out
    assert words.main(again[1:]) == 0 and "1 of 1 random calls pass" in capsys.readouterr().out


def test_an_infinity_of_the_other_sign_is_wrong():
    x, inf = torch.tensor([1.0, -torch.inf]), float("inf")
    assert relative_error(x, x) == 0 and oracle.worst_row(x, x, 0.1) == 0
    for other in (x.abs(), x.nan_to_num(neginf=0.0), x.flip(0), x * torch.nan):
        assert relative_error(other, x) == oracle.worst_row(other, x, 0.1) == inf


def test_verify_runs_in_the_ranks_of_torchrun(tmp_path):
    printed = launched(ROOT / "ringattn" / "__main__.py", ["verify", "random=9"], 2, tmp_path)
    assert printed.count("random calls pass") == 1  # one rank speaks
    assert "2 ranks (processes, gloo)" in printed and "linear" in printed


@pytest.mark.parametrize(
    ("argv", "status", "lines"),
    [
        ([], 0, ["ok    torch", "2 processes compute one attention together", "everything that is needed works"]),
        (["timeout=0.01"], 1, ["bad   gloo", "-> ", "GLOO_SOCKET_IFNAME", "broken: gloo\n"]),
    ],
    ids=["sound", "ranks that do not answer"],
)
def test_doctor_says_what_works_and_what_to_do_about_what_does_not(argv, status, lines, capsys):
    assert words.main(["doctor", *argv]) == status
    output = capsys.readouterr().out
    assert all(line in output for line in lines), output


def test_doctor_survives_a_check_that_breaks():
    found = {each.what: each for each in doctor.examine(doctor.Options(timeout="which is no number"))}
    assert found["gloo"].state == "bad" and "TypeError" in found["gloo"].detail
    missing = doctor.package("no-such-package", (), "jax", "if you use JAX")
    assert (missing.state, missing.detail) == ("none", "not installed") and "ringattn[jax]" in missing.remedy
    assert "torch>=99" in doctor.package("torch", (99,), "torch", "").remedy


def test_plot_has_a_panel_a_direction_and_a_bar_a_line():
    pytest.importorskip("matplotlib")
    from ringattn.launch.commands import plot

    axes = plot.bars(LINES).axes
    assert [ax.get_title() for ax in axes] == ["fwd, TFLOP/s", "bwd, TFLOP/s"]
    assert [[round(bar.get_width()) for bar in ax.patches] for ax in axes] == [[600, 599], [500]]
    (single,) = plot.bars([line for line in LINES if line["mode"] == "fwd"], metric="ms").axes
    assert [bar.get_width() for bar in single.patches] == [2.0, 2.0]


def test_plot_draws_a_run_as_a_line_over_its_steps(tmp_path):
    pytest.importorskip("matplotlib")
    from ringattn.launch.commands import plot

    rows = [{"kind": "step", "step": i, "loss": 3.0 - i, "mfu": 0.5} for i in (2, 1)]
    rows += [{"kind": "eval", "step": 2, "loss": 1.5}, {"kind": "memory", "step": -8, "memory_mib": 3.0}]
    (ax,) = plot.curve(rows).axes
    assert [list(line.get_xydata().ravel()) for line in ax.lines] == [[1, 2.0, 2, 1.0], [2, 1.5]]
    assert ax.get_ylabel() == "loss, nats a token"
    assert words.main(["plot", written(tmp_path / "metrics.jsonl", rows)]) == 0
    assert ElementTree.parse(tmp_path / "metrics.svg").getroot().tag.endswith("svg")
