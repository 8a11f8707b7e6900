"""Plain PyTorch scripts of the tasks, as a good user would write them, for `python -m bench training`.

Each file is the core of a script, to be read from top to bottom, and has nothing of Stretto in it: torch's layers,
`DataLoader`, padded batches in shuffled order, torch's optimisers and schedules. Data come in as arrays. `epoch()`
trains one epoch and `quality()` measures the validation part.
"""
