"""Multiple shooting: the states at the boundaries of chunks are what is to be found."""
