"""What the command line does, without printing: functions that return answers."""
