"""Run as `python -m tidewater_operator`."""

import sys

from tidewater_operator.main import main

sys.exit(main())
