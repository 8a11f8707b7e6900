"""One step of a cell as a graph: traced or written down, analysed, and differentiated."""
