"""`python -m lpxtop` is the same as `lpxtop`."""

from lpxtop.cli import main

main()
