"""A network drawn as layers and connections with delays, as a cell."""
