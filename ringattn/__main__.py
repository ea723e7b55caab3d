"""`ringattn NAME [key=value ...]` runs launch/NAME.py; `ringattn` alone lists the names."""

import sys

from ringattn.launch.words import main

if __name__ == "__main__":
    sys.exit(main())
