"""OpenAI's responses, the conversations that they belong to, and what is stored of both."""
