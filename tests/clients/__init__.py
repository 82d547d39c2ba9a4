"""Popular clients as they come, each in an environment of its own: `make clients`."""
