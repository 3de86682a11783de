"""``python -m accelerate`` is the ``accelerate`` command."""

import sys

from accelerate.cli.main import main

sys.exit(main())
