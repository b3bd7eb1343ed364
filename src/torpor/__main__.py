"""``python -m torpor``: the command line."""

import sys

from torpor.cli import main

sys.exit(main())
