"""Side by side with peers: ratios from one run, one file a question."""
