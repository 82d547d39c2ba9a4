"""OpenAI's dialects: chat completions, responses and legacy completions."""
