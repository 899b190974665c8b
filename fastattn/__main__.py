"""`python -m fastattn`, the command where its script is not on the path. Torch is loaded by then, so help is slower."""

import sys

from fastattn_command import main

sys.exit(main())
