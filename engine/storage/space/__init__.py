"""Who has how much of the disk, and what goes first where there is no room."""
