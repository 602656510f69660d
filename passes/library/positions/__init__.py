"""Passes that change how a model knows positions."""
