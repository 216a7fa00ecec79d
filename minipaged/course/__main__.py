"""`python -m minipaged.course grade ARGS` is the same as `minipaged grade ARGS`."""

from __future__ import annotations

import sys

from minipaged.cli import main

main(sys.argv[1:] if sys.argv[1:2] and sys.argv[1].startswith("grade") else ["course", *sys.argv[1:]])
