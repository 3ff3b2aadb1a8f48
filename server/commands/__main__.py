"""`python -m slipstream.server.commands` is the console script."""

import sys

from . import main

sys.exit(main())
