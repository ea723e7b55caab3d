"""A plan played event by event: what it is without trouble, and what trouble does to it."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import ringattn as ra
from ringattn.choosing import elsewhere, factored
from ringattn.launch import words
from ringattn.launch.bench.plans import setting_of
from ringattn.launch.rows import read
from ringattn.layouts.layout import Layout
from ringattn.masks.spec import AttentionSpec
from ringattn.plans.candidates import Asked, compared, problem_of, rates_of
from ringattn.plans.cost import seen_pairs
from ringattn.plans.course import OfTable, OfWholeBlocks, Ring, at_distances
from ringattn.plans.machine import Link, load
from ringattn.plans.plan import Plan
from ringattn.plans.simulation import play
from ringattn.plans.sizes import Transport
from ringattn.steps.reads import Reads
from ringattn.steps.table import build

ROWS = Path(__file__).parent.parent / "benchmarks" / "hosts-cpu.jsonl"


def given(machine, ranks, tokens, strategy="auto", route="auto", layout="zigzag", sizes=None, **asked):
    sizes, machine = tuple(sizes or factored(ranks)), load(machine)
    axes = elsewhere("cuda", sizes).bind(1, 1)
    alone = Plan(tokens, heads=(64, 8), head_dim=128, axes=axes, machine=machine, **asked)
    return Asked(alone, sizes, machine.gpus, strategy, layout, AttentionSpec(), None, "bfloat16", Transport(route))


def best(*place, **how):
    """What is asked, and its fastest way."""
    asked = given(*place, **how)
    return asked, compared(asked)[0]


def played(asked, option, **trouble):
    rates = rates_of(asked.problem(option.plan, asked.shape), option.plan, asked.machine)[1]
    return play(option.plan, asked.shape, asked.spec, asked.docs, asked.machine, rates, **trouble)


@pytest.mark.parametrize("machine", ["h200", "internet"])
@pytest.mark.parametrize("ranks", [4, 16])
def test_without_trouble_it_takes_what_is_predicted(machine, ranks):
    asked = given(machine, ranks, 2**17)
    for option in compared(asked)[:8]:
        seconds = played(asked, option).seconds
        assert seconds == pytest.approx(option.cost.seconds, rel=0.2), option


@pytest.mark.parametrize("strategy", ["ring", "gather", "ulysses"])
def test_a_call_takes_no_less_than_its_launches(strategy):
    slow = load("h200").replace(step=(0.03, 0.05), exchange=0.02)
    asked, option = best(slow, 4, 2**12, strategy, sizes=[(1, 4)] if strategy == "ulysses" else [(4, 1)], graphs="off")
    assert played(asked, option).seconds == pytest.approx(option.cost.seconds, rel=0.01)
    assert option.cost.seconds == option.cost.host > 0.08


def test_one_slow_rank_delays_its_ring_and_not_more_than_it_is_slow():
    asked, option = best("h100", 32, 2**18, "ring")
    clean, slow = played(asked, option), played(asked, option, slow="rank7:0.5")
    assert 1.5 < slow.seconds / clean.seconds <= 2.01
    host = played(asked, option, slow="host1:0.5")
    assert host.seconds >= 0.99 * slow.seconds


def test_ranks_share_cores_only_while_they_compute():
    """Two ranks on one core: of the last one's two steps the first meets the other rank's, and the second waits."""
    far = load("internet")
    far = far.replace(gpus=2, inside=far.between)
    steps, costs = [], []
    for cores in (0.0, 1.0):
        asked, option = best(far.replace(cores=cores), 2, 2**14, "ring", "relay", layout="contiguous")
        _, begun, ended = played(asked, option, backward=False, watched=range(2)).steps
        steps.append(ended - begun)
        costs.append(option.cost.forward.work)
    (own, later), (shared, alone) = steps
    assert shared == pytest.approx(2 * own, rel=1e-3) and alone == pytest.approx(later, rel=1e-3) and later[1] > 0
    assert costs[1] == pytest.approx(2 * costs[0])  # a prediction has all ranks compute at once


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("hosts", "together", "causal"), [(1, 3, False), (2, 2, False), (8, 1, False), (4, 1, True)])
def test_steps_of_a_large_ring_are_those_of_a_table_of_whole_blocks(hosts, together, causal, layout):
    tokens, spec = Layout(layout, 1024, 8, 2), AttentionSpec(causal=causal)
    pairs = seen_pairs(tokens, tokens, spec)
    reader, block = np.nonzero(pairs)
    table = build(Reads(8, 128, reader, block, 0 * block, 0 * block + 128), hosts, together)
    ring = Ring(tokens, tokens, spec, None, hosts, 8)
    large = OfWholeBlocks(ring, np.arange(8), at_distances(pairs, np.arange(8), ring), together)
    small = OfTable(ring, table, pairs)
    assert large.count == small.count and (large.first == small.first).all()
    for s in range(large.count):
        each = [(*x.met(s, s + 1), *(() if causal else (x.hops(s, s + 1), x.homes(s, s + 1)))) for x in (large, small)]
        for one, two in zip(*each, strict=True):  # causal tables leave out hops that nobody needs
            assert sorted(np.array(one).T.tolist()) == sorted(np.array(two).T.tolist()), s


def test_gradients_return_by_the_link_of_the_rank_that_computed_them():
    """One of two hosts sends keys, the other gradients: backward's two transfers do not wait for each other."""
    asked, option = best("internet", 2, 2**14, "ring", "relay", layout="contiguous")
    forward, both = (played(asked, option, backward=back, watched=range(2)) for back in (False, True))
    assert both.finish[0, 0] > both.finish[1, 0]  # gradients arrive where keys came from
    sent = forward.steps[0].max()
    assert both.seconds - forward.seconds > 1.8 * sent  # keys again, then gradients


def test_exchanges_wait_for_what_links_carry():
    """A ring of two, each over two hosts: the first sends keys, and its heads then go by the same link."""
    narrow = load("internet").replace(between=Link(1e7, 0.0))
    asked, option = best(narrow, 4, 2**14, "ring", layout="contiguous", sizes=[(2, 2)])
    run = played(asked, option, backward=False, watched=range(4))
    arrived, begun, ended = run.steps
    swap = begun[0, 0]  # heads of queries, keys and values, and later of the output, go in turn
    sent = arrived[1].max() - swap
    assert sent > 5 * (ended - begun).max()  # the link decides
    assert run.finish[0, 0] == pytest.approx(swap + sent + swap, rel=0.02)


def test_sums_of_a_block_that_is_passed_on_go_with_it_and_home_from_its_last_holder():
    """The link to the last rank carries keys of three blocks and, in float32, sums of two; then the last goes home."""
    far = load("internet").replace(between=Link(1e8, 0.0))
    asked, option = best(far, 4, 2**14, "ring", "relay", layout="contiguous", sizes=[(4, 1)])
    forward, both = (played(asked, option, backward=back, watched=range(4)) for back in (False, True))
    block = forward.steps[0].max() / 3
    assert (both.seconds - forward.seconds) / block == pytest.approx(3 + 2 * 2 + 2, rel=0.05)


def test_no_step_begins_before_its_keys_or_before_the_step_before_it():
    asked = given("internet", 8, 2**16, "ring", "relay")
    run = played(asked, compared(asked)[0], slow="rank3:0.3", watched=range(8))
    arrived, begun, ended = run.steps
    assert (begun >= arrived).all() and (ended >= begun).all()
    assert (begun[1:] >= ended[:-1] - 1e-12).all()


def simulated(row):
    """Milliseconds of a candidate on emulated hosts, simulated with what was calibrated there."""
    measured, (strategy, *sizes) = row["calibrated"], row["plan"].replace(" x ", " ").split()
    inside, between = (Link(**measured[name]) for name in ("inside", "between"))
    cpu = load("cpu")
    machine = cpu.replace(
        gpus=measured["gpus"], cores=measured["cores"], start=tuple(measured["start"]), inside=inside, between=between,
        rates={**cpu.rates, **{name: tuple(rate) for name, rate in measured["rates"].items()}},
    )  # fmt: skip
    setting = setting_of(row["setting"], SimpleNamespace(head_dim=32, device="cpu"))
    asked, sizes = setting.case.asked, [int(x) for x in sizes]
    ring, ulysses = (1, *sizes) if strategy == "ulysses" else (*sizes, 1)[:2]
    plan = ra.plan(
        elsewhere("cpu", [(ring, ulysses)], gpus=machine.gpus), seq_len=setting.case.tokens, head_dim=32,
        heads=(setting.heads, setting.kv_heads), strategy=strategy, layout=row["layout"], machine=machine,
        transport=Transport(row["route"]), kernel=row["kernel"], **asked,
    )  # fmt: skip
    shape = plan.shape(4)
    rates = rates_of(problem_of(plan, shape, asked["spec"], "float32", None, ()), plan, machine)[1]
    backward = row["mode"] != "forward"
    return play(plan, shape, asked["spec"], None, machine, rates, backward=backward).seconds * 1e3


def test_calls_between_emulated_hosts_take_what_is_simulated():
    """Rows of `make test-hosts` have what was calibrated there. The worst are short calls, half compute."""
    rows = [row for row in read(ROWS) if "calibrated" in row]
    off = [simulated(row) / row["ms"] - 1 for row in rows]
    within = [np.mean(np.abs(off) < most) for most in (0.2, 0.3)]
    assert len(off) > 50 and within[0] > 0.94 and within[1] > 0.99, sorted(off)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["ranks=32", "slow=rank40:0.5"], "there are 32 ranks and 4 hosts, counted from 0"),
        (["ranks=32", "slow=node1:0.5"], "give rank7:0.8 or host2:0.5"),
        (["ranks=100000"], "at most 65536 are simulated"),
        (["ranks=32768", "ulysses=1"], "rings of at most 16384 ranks are simulated"),
        (["ranks=6", "ulysses=4"], "ulysses=4 does not divide ranks=6"),
    ],
)
def test_wrong_words_are_refused(argv, says, capsys):
    assert words.main(["simulate", *argv]) == 2
    assert says in capsys.readouterr().err


def test_the_command_draws_the_timeline_and_says_what_a_slow_rank_costs(capsys):
    assert words.main(["simulate", "machine=internet", "ranks=2", "slow=rank0:0.8"]) == 0
    printed = capsys.readouterr().out
    last, lines = re.search(r"rank (\d) is the last", printed)[1], re.findall(r" rank (\d) ([#.-]+)", printed)
    assert "cost +" in printed and len(lines) == 2 and len(dict(lines)[last]) == max(len(marks) for _, marks in lines)
