"""Events to what a person sees: the console and HTML pages."""
