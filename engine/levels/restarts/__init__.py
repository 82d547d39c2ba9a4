"""What an engine takes over from the one before."""
