"""Model, loss and metric for a kind of data."""
