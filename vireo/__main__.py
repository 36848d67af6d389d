"""`python -m vireo`: the `vireo` command."""

import sys

from vireo.cli import main

sys.exit(main())
