"""Plain PyTorch scripts of the tasks, as a good user would write them, for `python -m bench training`.

They have nothing of Stretto in them: torch's layers, `DataLoader`, padded batches in shuffled order, torch's optimisers
and schedules. Data come in as arrays. `epoch()` trains one epoch and `quality()` measures the validation part. Each
file is the core of a script, to be read from top to bottom; `loop.py` is the loop that most of them share.
"""
