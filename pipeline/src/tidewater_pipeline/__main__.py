"""Run as `python -m tidewater_pipeline`."""

import sys

from tidewater_pipeline.cli.main import main

sys.exit(main())
