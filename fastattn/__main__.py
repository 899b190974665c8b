"""`python -m fastattn`, the command where its script is not on the path. Torch is loaded by then: help is slower, and
OpenMP has read what `fastattn_command` would set."""

import sys

from fastattn_command import main

sys.exit(main())
