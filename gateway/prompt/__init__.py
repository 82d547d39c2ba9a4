"""From canonical prompts to token ids, and from token ids back to text."""
