"""Newton's method on all steps at once."""
