"""Loops as generated C++ for the CPU: `generate` writes the code, `compiler` compiles it, `kernel` runs it."""
