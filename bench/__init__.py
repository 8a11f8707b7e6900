"""Comparisons with other implementations: ratios from one run, one file per question."""
