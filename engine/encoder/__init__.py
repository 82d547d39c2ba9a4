"""Encoders: models that turn a text into one vector, in a process of their own."""
