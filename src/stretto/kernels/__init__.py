"""Loops made runnable: the eager reference, generated C++, and what shares them out."""
