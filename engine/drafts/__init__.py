"""Guesses at the next tokens of sequences."""
