"""What the disk has, in rows: records, quotas, promises, and which go first."""
