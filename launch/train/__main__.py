"""`python -m ringattn.launch.train`, which is what torchrun starts."""

import sys

from ringattn.launch.train.start import main

sys.exit(main())
