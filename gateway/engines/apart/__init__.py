"""Prompts that one replica computes for the answer of another."""
