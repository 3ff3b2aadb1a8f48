"""Makes `python -m slipstream.server.commands` run the console script."""

import sys

from . import main

sys.exit(main())
