"""The command `python -m minipaged`, which does the same as `minipaged`."""

from minipaged.cli import main

main()
