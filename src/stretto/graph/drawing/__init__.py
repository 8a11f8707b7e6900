"""A cell's graph as a picture."""
