"""Findings: why prompts were computed, or paid for, again, in words and in dollars."""
