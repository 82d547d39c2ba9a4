"""The models that one gateway serves, each with an engine of its own."""
