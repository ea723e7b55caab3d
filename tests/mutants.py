"""Changes of the source that a quick test must notice: `make test-mutants`, or with words of names after it ARGS=.

Each is made in a copy of the tree, where its tests must then fail; they pass without it. A change that survives is a
promise that no test keeps. What cannot be seen from outside (a sum in another order, an equal program) is not here.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 240  # seconds for one mutant's tests: a rank that waits for ever is noticed by nobody


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def dense(*cases: str) -> tuple[str, ...]:
    return tuple(f"test_attention.py::test_equals_dense_float64[{case}]" for case in cases)


RING = dense("all_at_once-ring4x1-zigzag")
OTHER_WAYS = ("test_attention.py::test_other_ways_to_bring_keys_equal_it_too",)
GATHER, ULYSSES = dense("all_at_once-gather4x1-zigzag"), dense("all_at_once-ulysses1x4-contiguous")
BOUNDS = ("test_spec.py::test_bounds_are_the_mask_and_never_decrease",)
LAYOUTS = (
    "test_layout.py::test_every_position_is_on_exactly_one_rank_and_shards_are_sorted_and_equal",
    "test_layout.py::test_count_below_is_searchsorted",
)
NEEDED = ("test_steps.py::test_needed_blocks_and_seen_pairs_are_those_of_the_dense_mask",)
ROUNDS = ("test_steps.py::test_steps_meet_exactly_what_is_needed_and_gradients_come_home",)
REFERENCE = ("test_reference.py::test_forward_and_backward_are_the_definition",)
PARTIAL = (
    "test_partial.py::test_the_sign_the_weight_of_a_grows_with_its_own_lse",
    "test_partial.py::test_an_lse_of_minus_infinity_is_an_empty_side",
)
STATES = tuple(f"test_linear_ranks.py::test_equals_the_recurrence[4-1-zigzag-{way}]" for way in ("gather", "ring"))
WORK = ("test_planning.py::test_work_is_counted_exactly_and_zigzag_balances_it",)
BYTES = ("test_planning.py::test_gathered_bytes_are_those_of_the_other_ranks_keys",)
BELOW = ("test_serving.py::test_positions_are_balanced_at_any_length_and_below_counts_them",)
CACHE = tuple(f"test_cache_random.py::test_caches_hold_what_they_were_given[{seed}]" for seed in range(6))
DOCUMENTS = (
    "test_linear_states.py::test_every_document_goes_on_from_its_own_state",
    "test_linear_states.py::test_long_documents_are_cut_and_joined",
)
HALO = ("test_nn_linear.py::test_the_convolution_reaches_over_segments_shorter_than_itself",)
JAX = tuple(f"test_jax.py::test_equals_dense_float64[{name}-ring4x1-contiguous]" for name in ("causal", "all_at_once"))

MUTANTS = (
    # who sees whom
    Mutant("window_one_more", "ringattn/masks/bands.py", "((at - begin).clip(min(left, most), None)",
           "((own - 1 - begin).clip(min(left, most), None)", BOUNDS),
    Mutant("stripe_rounds_down", "ringattn/layouts/layout.py", "(position - r.start + r.step - 1) // r.step",
           "(position - r.start) // r.step", LAYOUTS),
    Mutant("zigzag_unequal_halves", "ringattn/layouts/layout.py", "lcm(self.maker.blocks, self.ulysses)",
           "self.ulysses", LAYOUTS),
    Mutant("zigzag_second_half", "ringattn/layouts/layout.py", "(rank, 2 * ranks - 1 - rank)",
           "(rank, 2 * ranks - 2 - rank)", LAYOUTS),
    Mutant("swapped_back", "ringattn/torch/attention/ulysses.py", "index_select(1, order[1])",
           "index_select(1, order[0])", ("test_for_docs.py",)),
    # who meets whom
    Mutant("home_too_early", "ringattn/steps/table.py", "last = Transfers(after[hops],",
           "last = Transfers(after[hops - 1],",
           ("test_simulation.py::test_gradients_return_by_the_link_of_the_rank_that_computed_them",)),
    Mutant("tokens_stop_early", "ringattn/steps/table.py", "paired(1, hops)", "paired(1, hops - 1)", ROUNDS),
    Mutant("too_much_at_once", "ringattn/steps/table.py", "np.minimum(together * length, 3 * before)",
           "together * length",
           ("test_steps.py::test_a_step_brings_what_can_hide_behind_the_work_before_it",)),
    # partials and gradients
    Mutant("merge_sign", "kernels/partial.py", "b.lse - a.lse)", "a.lse - b.lse)", PARTIAL),
    Mutant("empty_side_counts", "kernels/partial.py", "xp.zeros_like(part.out), part.out), part.lse)",
           "part.out, part.out), part.lse)", PARTIAL),
    Mutant("sink_gradient_sign", "kernels/partial.py", "astype(-(weight", "astype((weight", RING),
    Mutant("lse_sign_of_delta", "kernels/rows.py", "else delta - dlse", "else delta + dlse", REFERENCE + RING),
    Mutant("softcap_slope", "kernels/attention/tiled.py", "1 - (torch.where(s == NEVER, 0.0, s) / softcap) ** 2",
           "1 - torch.where(s == NEVER, 0.0, s) / softcap", RING),
    Mutant("dq_without_scale", "kernels/attention/tiled.py", "ungrouped(dq_rows, dq[:, queries]) * scale",
           "ungrouped(dq_rows, dq[:, queries])", RING),
    Mutant("rounded_at_every_step", "ringattn/torch/attention/steps.py",
           "self.q.dtype if rounded else None", "self.q.dtype",
           ("test_attention.py::test_outputs_are_rounded_once_however_many_steps_a_ring_has",)),
    Mutant("own_gradients_lost", "ringattn/torch/attention/ring.py",
           "    local.add_at(returned_rows, returned.wait() or ())\n    return", "    returned.wait()\n    return",
           ("test_attention.py::test_other_ways_to_bring_keys_equal_it_too",)),
    Mutant("stripes_out_of_order", "ringattn/steps/rank.py",
           "range(a, a + len(r) * (b - a), b - a)", "range(a, a + len(r))", OTHER_WAYS),
    Mutant("padding_meets_tokens", "ringattn/torch/attention/ulysses.py", "return x if real is None else torch.where(",
           "return x if True else torch.where(", ULYSSES),
    Mutant("copies_of_key_heads", "ringattn/torch/attention/ulysses.py", "x.repeat_interleave(times, 2) if",
           "x.repeat(1, 1, times, 1) if", dense("causal-ulysses1x4-contiguous")),
    Mutant("gathered_order", "ringattn/torch/attention/gather.py", "x.index_select(1, order[0])",
           "x.index_select(1, order[1])", GATHER),
    Mutant("kind_without_gradients", "ringattn/torch/attention/call.py",
           "spec, docs, key_docs, gradients, keep, return_lse)",
           "spec, docs, key_docs, keep, return_lse)",
           ("test_works_with.py::test_no_grad_and_inference_mode_give_the_same_bits_and_keep_nothing",)),
    Mutant("token_count_in_float32", "ringattn/models/loss.py",
           "torch.stack([mine.detach().double(), counted.sum().double()])",
           "torch.stack([mine.detach().float(), counted.sum().float()])",
           ("test_loss.py::test_tokens_are_counted_exactly",)),
    Mutant("copies_added_in_16_bits", "ringattn/torch/attention/ulysses.py",
           "return x.unflatten(2, (kv_heads, times)).sum(3, dtype=accumulator(x)).to(x.dtype)",
           "return sum(x.unflatten(2, (kv_heads, times)).unbind(3))",
           ("test_attention.py::test_the_copies_of_a_key_head_add_up_in_float32",)),
    # caches and states
    Mutant("cache_offset", "ringattn/torch/inference/chunk.py", "chunk.tokens, total, offset=before)",
           "chunk.tokens, total, offset=before + 1)", CACHE),
    Mutant("cache_stripes", "ringattn/serving.py", "whole * self.block + xp.minimum",
           "whole * self.block + 1 + xp.minimum", BELOW),
    Mutant("cache_origin", "ringattn/serving.py", "xp.asarray(position) - self.origin", "xp.asarray(position)",
           ("test_cache.py::test_steps_split_by_queries_by_keys_and_by_both",)),
    Mutant("landing_rows", "ringattn/torch/inference/chunk.py",
           "source = mine if order is None else np.argsort(order.order())[mine]",
           "source = mine", CACHE),
    Mutant("states_added", "kernels/linear/maps.py", "torch.addcmul(self.kv, self.factor, state)",
           "self.kv + state", STATES),
    Mutant("states_composed_backwards", "kernels/linear/maps.py", "later.after(self.kv))",
           "self.after(later.kv))",
           ("test_linear_ranks.py::test_equals_the_recurrence[2-2-contiguous-ring]",)),
    Mutant("gate_without_what_passes", "kernels/linear/chunkwise.py", "dgs + passing[..., None, :]", "dgs", STATES),
    Mutant("rows_not_joined", "ringattn/torch/linear/documents.py",
           "states.append(self.level(maps, i, count).after(states[-1][:count]))",
           "states.append(states[-1][:count])", DOCUMENTS),
    Mutant("passing_documents_stop", "ringattn/torch/linear/documents.py", "for segment, rows in self.passing:",
           "for segment, rows in self.passing[:0]:", DOCUMENTS),
    Mutant("passing_gradients_go_forward", "ringattn/torch/linear/documents.py", "rows[::-1] if backward else rows",
           "rows", DOCUMENTS),
    Mutant("empty_documents_have_no_gradient", "ringattn/torch/linear/documents.py",
           "dend.index_select(0, self.empty)", "0 * dend.index_select(0, self.empty)", DOCUMENTS),
    Mutant("rows_filled_with_tokens", "ringattn/torch/linear/documents.py", ".index_fill_(0, none, 0)", "", DOCUMENTS),
    Mutant("halo_one_token_off", "ringattn/torch/linear/halo.py", "np.arange(-count, 0)",
           "np.arange(-count - 1, -1)", HALO),
    Mutant("halo_of_the_wrong_segment", "ringattn/torch/linear/halo.py", "source[segment] = np.where",
           "source[:] = np.where", HALO),
    Mutant("gradients_of_tokens_not_back", "ringattn/torch/sharding.py", "leaving.index_select(0, self.unsort)",
           "leaving.index_select(0, self.sort)", ("test_roll.py",)),
    # what a plan costs
    Mutant("gather_costs_nothing", "ringattn/plans/plan.py", '(self.ring - 1) * keys * (self.strategy',
           '0 * keys * (self.strategy', BYTES),
    Mutant("rising_pairs", "ringattn/plans/cost.py", "later = count * (count - 1) // 2", "later = 0 * count",
           WORK + NEEDED),
    # JAX
    Mutant("jax_causal", "ringattn/masks/bands.py", "((end - 1 - at).clip(min(right, most), None)",
           "((end - own).clip(min(right, most), None)", JAX),
    Mutant("jax_source", "ringattn/jax/attention/steps.py", "(self.rank - distance) % self.keys.ring",
           "(self.rank + distance) % self.keys.ring", JAX),
    Mutant("jax_gradients_home", "ringattn/plans/spmd.py",
           "Rotation(-self.distances[-1],", "Rotation(self.distances[-1],", JAX),
)  # fmt: skip


def main(words: list[str]) -> int:
    """Run the mutants whose names hold one of the words, or all; the exit status is 1 if one survives."""
    chosen = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(
            ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__")
        )
        status, output = tests_in(tree, list(dict.fromkeys(t for m in chosen for t in m.tests)), 20 * LIMIT)
        if status:
            print(f"the tests fail without any change:\n{output}")
            return 1
        bad = [m.name for m in chosen if not noticed(tree, m)]
    print(f"{len(chosen) - len(bad)} of {len(chosen)} changes are noticed" + f"; not: {', '.join(bad)}" * bool(bad))
    return int(bool(bad))


def noticed(tree: Path, mutant: Mutant) -> bool:
    """Whether the mutant's tests fail; the tree is as it was afterwards."""
    path, begun = tree / mutant.file, time.perf_counter()
    source = path.read_text()
    if source.count(mutant.old) != 1:
        print(f"STALE     {mutant.name}: {mutant.file} has {mutant.old!r} {source.count(mutant.old)} times")
        return False
    path.write_text(source.replace(mutant.old, mutant.new))
    status, output = tests_in(tree, list(mutant.tests), LIMIT)
    path.write_text(source)
    failed = [line.split(" - ")[0].removeprefix("FAILED tests/") for line in output.splitlines() if "FAILED " in line]
    good, seconds = status == 1 and bool(failed), time.perf_counter() - begun
    how = failed[0] if good else f"exit status {status}" if status else mutant.file
    print(f"{'noticed' if good else 'SURVIVES'}  {mutant.name} ({seconds:.0f} s): {how}", flush=True)
    return good


def tests_in(tree: Path, tests: list[str], limit: float) -> tuple[int, str]:
    """pytest's exit status and what it printed; -1 where it takes too long."""
    command = [sys.executable, "-B", "-m", "pytest", "-x", "--no-header", "-rf", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-m", "not slow", *(f"tests/{t}" for t in tests)]
    given = {**os.environ, "PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(command, cwd=tree, env=given, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return -1, ""
    return done.returncode, done.stdout[-4000:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
