"""`python -m sametoken`."""

from sametoken.cli import main

main()
