"""What `trunkline doctor` checks. Begin with `command`; each check returns `check.Check`s."""
