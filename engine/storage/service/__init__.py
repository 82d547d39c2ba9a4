"""The storage process's service of one engine over one folder."""
