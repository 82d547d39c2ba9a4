"""Structured output: grammars that constrain decoding, and parsers that read tool calls."""
