"""Stored responses and conversations in the database, within each tenant's quota."""
