"""Anthropic's dialect: Messages and token counting."""
