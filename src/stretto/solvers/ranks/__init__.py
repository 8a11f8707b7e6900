"""Time over ranks: each has a block of it."""
