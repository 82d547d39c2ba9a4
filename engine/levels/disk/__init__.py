"""The disk as a level below the device: what is stored and looked up, and whether it is there."""
