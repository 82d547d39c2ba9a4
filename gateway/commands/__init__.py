"""What the command line does, without printing: functions that return text and tables."""
