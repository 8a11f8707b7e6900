"""The experiments of four papers, run as `python -m experiments PAPER`."""
