"""`python -m ringattn.launch.train`, which is what torchrun starts."""

import sys

from ringattn.launch.words import main

sys.exit(main(["train", *sys.argv[1:]]))
