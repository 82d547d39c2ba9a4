"""HTTP handlers of the admin listener."""
