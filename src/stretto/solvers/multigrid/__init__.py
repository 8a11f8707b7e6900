"""Multigrid in time: coarse grids tell chunks where to begin."""
