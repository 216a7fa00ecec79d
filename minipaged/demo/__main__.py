"""Run `minipaged demo ARGS`, for `python -m minipaged.demo ARGS`."""

from __future__ import annotations

import sys

from minipaged.cli import main

main(["demo", *sys.argv[1:]])
