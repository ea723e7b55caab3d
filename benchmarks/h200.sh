#!/usr/bin/env bash
# The figures of this folder that need H200s, each with the command that makes it:
#
#     benchmarks/h200.sh OUT kernels linear            # any of the names below; one GPU, or four, as it says
#     RANKS=2 benchmarks/h200.sh OUT ring prefill      # on two instead of four
#
# Every name writes OUT/NAME.jsonl. Ratios within one run are evidence, single times are not.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}"
OUT=$1
shift
mkdir -p "$OUT"

R=${RANKS:-4}
bench() { python3 -m ringattn bench "$1" out="$OUT/$name.jsonl" "${@:2}"; }

# one GPU
kernels() { # with FlashAttention-4 installed, and again without it
    bench kernels mask=causal,full,short tokens=8192,32768,131072
    bench kernels mask=4096 tokens=65536 && bench kernels head_dim=64
}
linear() { for rule in gated delta kimi; do bench ring ranks=1 rule=$rule heads=16 tokens=32768,131072; done; }

# four GPUs
ring() { bench ring ranks=$R tokens=16384,32768,131072; }
documents() { bench ring ranks=$R tokens=131072 mask=long,short; }
window() { bench ring ranks=$R tokens=131072 mask=4096; }
cudnn() { bench ring ranks=$R tokens=16384,32768,131072 kernel=cudnn; }
groups() { # Ulysses and gather, whole and by groups of heads, through both transports
    for n in 1 2 4; do
        bench ring ranks=$R ulysses=$R strategy=ulysses tokens=32768,131072 groups=$n transports=symmetric,group
        bench ring ranks=$R strategy=gather tokens=16384,32768 kernel=cudnn groups=$n
    done
}
graphs() { bench ring ranks=$R tokens=16384 transports=group,symmetric graphs=true; }
memory() { bench ring ranks=$R tokens=262144,524288,1048576 repeats=1; }
prefill() { bench inference ranks=$R ways=ring,whole,chunks tokens=8192,32768,131072 repeats=3; }
decode() { # one call alone, and many in a row
    for n in 1 20; do bench inference ranks=$R ways=decode,graph calls=$n tokens=1048576 transports=auto,group,symmetric; done
}
scan() { bench ring ranks=$R rule=gated heads=16 scan=gather,ring,pipeline tokens=$((8192 * R)),$((131072 * R)); }
jax() { bench jax ranks=$R kernel=cudnn; }
train() { # 7 blocks a GPU of the 8-billion shape
    python3 -m ringattn train experiment=h200_long model.layers=$((7 * R)) nproc=$R steps=8 picture=false folder="$OUT" run=long
}
million() {
    python3 -m ringattn train experiment=million model.layers=$R nproc=$R picture=false folder="$OUT" run=million
}

for name in "$@"; do
    began=$SECONDS
    "$name"
    echo "== $name: status $?, $((SECONDS - began)) s"
done
