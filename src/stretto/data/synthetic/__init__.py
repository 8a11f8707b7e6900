"""Data sets that are generated from a seed: nothing to download, the same everywhere."""
