"""Layers that users put in a model."""
