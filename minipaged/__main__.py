"""`python -m minipaged` is the same as `minipaged`."""

from minipaged.cli import main

main()
