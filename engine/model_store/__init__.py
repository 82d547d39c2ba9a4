"""Finding, fetching and preparing model folders, without torch."""
