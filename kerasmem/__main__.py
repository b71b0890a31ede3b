"""`python -m kerasmem` is the command line."""

from kerasmem.cli import main

main()
