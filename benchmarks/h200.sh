#!/usr/bin/env bash
# The figures of this folder that need H200s, each with the command that makes it:
#
#     benchmarks/h200.sh OUT kernels linear        # any of the names below; one GPU, or four, as it says
#
# Every name writes OUT/NAME.jsonl. Ratios within one run are evidence, single times are not.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}"
OUT=$1
shift
mkdir -p "$OUT"

bench() { python3 -m ringattn bench "$1" out="$OUT/$name.jsonl" "${@:2}"; }

# one GPU
kernels() { bench kernels; }
linear() { # beside flash-linear-attention, if it is installed
    bench linear cases=errors gate_dtype=float32
    bench linear cases=32k,131k,batch8
}

# four GPUs
ring() { bench ring tokens=16384,32768,131072; }
documents() { bench ring tokens=131072 mask=long && bench ring tokens=131072 mask=short; }
window() { bench ring tokens=131072 mask=4096; }
peers() { bench ring tokens=16384,32768,131072 kernel=cudnn peers=allgather,alltoall; }
groups() { # Ulysses and gather, whole and by groups of heads
    for n in 1 2 4; do
        bench ring ulysses=4 strategy=ulysses tokens=32768,131072 groups=$n floor=false
        bench ring strategy=gather tokens=16384,32768 kernel=cudnn groups=$n
    done
}
graphs() { bench ring tokens=16384 transports=group,symmetric graphs=true; }
memory() { bench ring tokens=262144,524288,1048576 modes=forward+backward floor=false repeats=1 warmup=1; }
prefill() {
    bench prefill device=cuda ranks=4 heads=32 kv_heads=8 head_dim=128 tokens=8192,32768,131072 chunk=8192
}
decode() { bench decode transports=auto,group,symmetric; }
scan() { bench scan tokens=8192,131072,262144 kernel=triton; }
jax() { bench jax kernel=cudnn; }
train() { # 28 blocks of the 8-billion shape, and their floor
    python3 -m ringattn train experiment=h200_long model.layers=28 nproc=4 steps=8 picture=false folder="$OUT" run=long
    bench step run="$OUT/long"
}
million() {
    python3 -m ringattn train experiment=million nproc=4 picture=false folder="$OUT" run=million
}

for name in "$@"; do
    began=$SECONDS
    "$name"
    echo "== $name: status $?, $((SECONDS - began)) s"
done
