"""The tests, as a package: fakes, models and checkers are imported by name."""
