"""The database under tenancy: a SQLite file or a PostgreSQL server, behind one interface."""
